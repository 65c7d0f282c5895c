"""Signs startup kits, so that FLARE refuses to start from one whose connection or identity was edited."""

from nvflare.lighter.constants import CtxKey, ProvFileName
from nvflare.lighter.spec import Builder, Project, ProvisionContext
from nvflare.lighter.utils import sign_folders


class KitSignatureBuilder(Builder):
    """Writes signature.json into the startup folder of every participant.

    FLARE checks a signature.json wherever it finds one, but its own builder writes it into kits for homomorphic
    encryption and confidential computing only. Has to be the last builder: what a later one writes is unsigned.
    """

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Sign with the key of the project's certificate authority.

        Raises:
            RuntimeError: no authority yet; the order of builders in project.yml is wrong.
        """
        key = ctx.get(CtxKey.ROOT_PRI_KEY)
        if key is None:
            raise RuntimeError("project.yml: builders: KitSignatureBuilder has to come after CertBuilder")
        for participant in project.get_all_participants():
            # startup alone: local belongs to the hospital, which edits it
            sign_folders(ctx.get_kit_dir(participant), key, signature_file=ProvFileName.SIGNATURE_JSON)
