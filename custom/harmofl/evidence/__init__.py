"""What a run leaves for people: results with a schema, and a report."""
