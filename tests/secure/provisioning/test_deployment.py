"""What `nvflare deploy prepare` makes of our inputs, and the image; nothing is started."""

import os
import re
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from tests.secure.provisioning.conftest import KIT_SCRIPT, PROVISIONING, ROOT, contents, read, storage_of


def _deploy(kit: Path, runtime: str, output: Path) -> Path:
    """`nvflare deploy prepare` of FLARE itself."""
    from nvflare.tool.deploy.deploy_commands import prepare_deployment

    config = PROVISIONING / runtime / f"{runtime}.yaml"
    prepare_deployment(Namespace(kit=str(kit), kit_flag=None, output=str(output), config=str(config)))
    return output


RUNTIMES = ["docker", "k8s", "slurm"]


class TestDeployment:
    @pytest.mark.parametrize("runtime", RUNTIMES)
    @pytest.mark.parametrize("name", ["server", "HK"])
    def test_generated_files_are_sound(self, project: Path, tmp_path: Path, runtime: str, name: str) -> None:
        prepared = _deploy(project / "prod_00" / name, runtime, tmp_path / "prepared")
        scripts = list(prepared.rglob("*.sh"))
        assert len(scripts) == {"docker": 1, "k8s": 0, "slurm": 2}[runtime]
        for script in scripts:
            checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stderr
            assert os.access(script, os.X_OK)
        for path in [*prepared.rglob("*.json"), *prepared.rglob("*.json.default")]:
            read(path)
        for path in [*prepared.glob("local/*.yaml"), *prepared.glob("helm_chart/*.yaml")]:
            yaml.safe_load(path.read_text())
        assert read(prepared / "local" / "comm_config.json")["internal"]["resources"]["connection_security"] == "mtls"
        launcher = read(prepared / "local" / "resources.json.default")["components"][-1]
        side = "Server" if name == "server" else "Client"
        kind = {"docker": "Docker", "k8s": "K8s", "slurm": "Slurm"}[runtime]
        assert launcher["path"].endswith(f".{side}{kind}JobLauncher")

    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_prepared_kits_are_set_up_like_any_other(self, project: Path, tmp_path: Path, runtime: str) -> None:
        site = _deploy(project / "prod_00" / "HK", runtime, tmp_path / "site")
        KIT_SCRIPT.prepare_kit(site, data_root=Path("/data/default/images"), in_container=True)
        resources = read(site / "local" / "resources.json")
        assert resources["components"][:-1] == read(site / "local" / "resources.json.default")["components"]
        assert resources["components"][-1]["id"] == "app_deployer"
        assert resources["class_allow_list"][-1] == "harmofl.flare.executor.HarmoFLExecutor"
        server = _deploy(project / "prod_00" / "server", runtime, tmp_path / "server")
        KIT_SCRIPT.prepare_kit(server)
        place = server if runtime == "slurm" else Path("/var/tmp/nvflare/workspace")  # as seen inside
        assert storage_of(server) == (place / "jobs-storage", place / "snapshot-storage")

    @pytest.mark.parametrize("name", ["server", "HK"])
    def test_helm_chart_holds_no_secret_and_runs_as_a_user(self, project: Path, tmp_path: Path, name: str) -> None:
        prepared = _deploy(project / "prod_00" / name, "k8s", tmp_path / "prepared")
        chart = contents(prepared / "helm_chart")
        assert not [path for path in chart if path.suffix in {".key", ".crt", ".pem"}]
        key = next((prepared / "startup").glob("*.key")).read_text().splitlines()[1].encode()
        assert not [path for path, text in chart.items() if b"PRIVATE KEY" in text or key in text]
        values = yaml.safe_load(chart[Path("values.yaml")])
        assert values["image"]["repository"].endswith("/harmofl")
        assert values["image"]["tag"] == _version()
        assert values["securityContext"]["runAsNonRoot"] is True
        assert values["securityContext"]["runAsUser"] == _image_user() != 0
        launcher = read(prepared / "local" / "resources.json.default")["components"][-1]["args"]
        assert launcher["security_context"] == values["securityContext"]

    def test_docker_starts_our_image_as_the_calling_user(self, project: Path, tmp_path: Path) -> None:
        script = (
            _deploy(project / "prod_00" / "HK", "docker", tmp_path / "kit") / "startup" / "start_docker.sh"
        ).read_text()
        assert f'DOCKER_IMAGE=${{NVFL_P_IMAGE:-"harmofl:{_version()}"}}' in script
        assert '--user "$(id -u):$(id -g)"' in script
        assert "--privileged" not in script

    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_jobs_read_images_and_keep_state_elsewhere(self, runtime: str) -> None:
        from nvflare.app_opt.job_launcher.study_runtime import load_study_runtime_file

        study = load_study_runtime_file(str(PROVISIONING / runtime / "study_runtime.yaml"), runtime)["default"]
        mounts = {mount.dataset: mount for mount in study.datasets}
        assert set(mounts) == {"images", "state"}
        assert mounts["images"].read_only
        assert mounts["images"].mount_path == "/data/default/images"
        assert not mounts["state"].read_only
        assert study.env == {"HARMOFL_STATE_ROOT": mounts["state"].mount_path}
        if runtime != "slurm":  # a file on the shared file system there
            config = yaml.safe_load((PROVISIONING / runtime / f"{runtime}.yaml").read_text())
            assert study.container_image == config["parent"]["docker_image"]

    def test_a_job_pod_has_shared_memory_and_no_rights(self) -> None:
        from nvflare.app_opt.job_launcher.k8s_launcher import K8sJobHandle

        config = {
            "name": "job",
            "image": "harmofl",
            "command": "module",
            "container_name": "container-job",
            "volume_list": [{"name": "workspace-job", "emptyDir": {}}],
            "volume_mount_list": [{"name": "workspace-job", "mountPath": "/workspace"}],
        }
        template = yaml.safe_load((PROVISIONING / "k8s" / "pod_job.yaml").read_text())
        pod = K8sJobHandle("job", None, config, pod_manifest_template=template).get_manifest()["spec"]
        container = pod["containers"][0]
        assert len(pod["containers"]) == 1
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/workspace"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["automountServiceAccountToken"] is False


def _version() -> str:
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def _instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: continued lines joined, comments left out."""
    text = (PROVISIONING / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def _image_user() -> int:
    return int([rest for word, rest in _instructions() if word == "USER"][-1].partition(":")[0])


class TestImage:
    def test_runs_as_a_user_who_exists(self) -> None:
        words = [word for word, _ in _instructions()]
        assert _image_user() != 0
        assert words.index("USER") > max(place for place, word in enumerate(words) if word in {"RUN", "COPY"})
        assert any(f"--uid {_image_user()} " in rest for word, rest in _instructions() if word == "RUN")

    def test_takes_in_the_package_and_nothing_else(self) -> None:
        copied = [name for word, rest in _instructions() if word == "COPY" for name in rest.split()[:-1]]
        assert sorted(copied) == ["LICENSE", "README.md", "custom/harmofl", "pyproject.toml", "requirements.txt"]
        assert all((ROOT / name).exists() for name in copied)
        assert not [rest for word, rest in _instructions() if word == "ADD"]
        ignored = (PROVISIONING / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
        assert ignored[1] == "*"
        assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(copied)

    def test_pins_are_those_of_the_project(self) -> None:
        steps = [rest for word, rest in _instructions() if word == "RUN"]
        install = next(step for step in steps if "-r pins.txt" in step)
        assert install.startswith("grep -v '^-e' requirements.txt > pins.txt")
        left = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("-e")]
        assert left[0].startswith("nvflare==")
        assert not [line for line in left if not re.match(r"[a-z0-9-]+==[\w.]+ +#", line)]
        extra = [word for word in install.partition("-r pins.txt")[2].split() if word]
        assert all("==" in word for word in extra)

    def test_base_image_has_a_supported_python(self) -> None:
        base = next(rest for word, rest in _instructions() if word == "FROM")
        assert base.startswith("python:3.11-slim")
