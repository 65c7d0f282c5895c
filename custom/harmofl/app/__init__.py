"""What a person types: the harmofl command."""
