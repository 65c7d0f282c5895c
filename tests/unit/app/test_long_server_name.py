"""A server whose full host name is longer than a certificate's common name may be. A19."""

from pathlib import Path

from cryptography import x509
from nvflare.lighter.entity import Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from harmofl.app.connection import check_server
from harmofl.app.kit import open_kit
from tests.unit.app.provisioned import PROJECT, Provisioning, TlsServer, problems

NAME = "federated-learning-server.department-of-radiology.university-hospital.example.org"


def test_a19_a_long_host_name_is_reached_and_its_certificate_fits(tmp_path: Path) -> None:
    """FLARE cuts the common name at 64 characters and keeps the whole one as host and as alternative name."""
    assert len(NAME) > 64
    project = Project(PROJECT, "a long name", props={"api_version": 3})
    ports = {"fed_learn_port": 8002, "admin_port": 8002}
    project.set_server(NAME, "consortium", {**ports, "host_names": ["localhost"], "default_host": NAME})
    project.add_client("HK", "hk", {})
    builders = [WorkspaceBuilder(["master_template.yml"]), StaticFileBuilder(config_folder="config"), CertBuilder()]
    context = Provisioner(str(tmp_path), builders).provision(project)
    folder = tmp_path / PROJECT / "prod_00"
    root = x509.load_pem_x509_certificate((folder / "HK/startup/rootCA.pem").read_bytes())
    kits = Provisioning(folder, root, context["root_pri_key"])
    site = open_kit(folder / "HK")
    assert (site.host, site.identity) == (NAME, NAME[:64])
    server = TlsServer(folder / NAME[:64])
    try:
        # this machine cannot resolve the name: the kit reaches it by the other one that the certificate has
        near = kits.copy("HK", tmp_path / "HK", port=server.port, **{NAME: "localhost"})
        assert not problems(check_server(open_kit(near)))
    finally:
        server.stop()
