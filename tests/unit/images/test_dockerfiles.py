"""What the Dockerfiles say, without building them; `make images-check` builds them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from images.finish import USER
from images.project import project
from images.variant import EXTRAS
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from tests.unit.images.dockerfile import Dockerfile, parse
from tests.unit.test_imports import ALLOWED

ROOT = Path(__file__).resolve().parents[3]
FILES = {name: ROOT / "services" / name / "Dockerfile" for name in ("gateway", "engine")}
STARTS = {"gateway": ("services.gateway",), "engine": ("services.pod", "services.model_source")}


@pytest.fixture(params=sorted(FILES))
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dockerfile(service: str) -> Dockerfile:
    return parse(FILES[service])


def packages(module: str) -> set[str]:
    """The package and, by the import rules, everything that it may reach."""
    home = max((top for top in ALLOWED if module == top or module.startswith(top + ".")), key=len)
    found, left = {home}, [home]
    while left:
        for name in ALLOWED[left.pop()]:
            top = name if name in ALLOWED else max((top for top in ALLOWED if name.startswith(top + ".")), key=len)
            if top not in found:
                found.add(top)
                left.append(top)
    return found


def test_bases_are_arguments_with_a_tag_that_is_not_latest(dockerfile: Dockerfile) -> None:
    bases = {stage.base for stage in dockerfile.stages}
    assert bases == {"scratch", "${BASE_IMAGE}", "${BUILDER_IMAGE}"}
    for name in ("BASE_IMAGE", "BUILDER_IMAGE"):
        tag = dockerfile.arguments[name].rpartition(":")[2]
        assert re.match(r"\d", tag), f"{name} is not pinned"
    python = [dockerfile.arguments[name].split("-")[0] for name in ("BASE_IMAGE", "BUILDER_IMAGE")]
    assert python[0] == python[1], "an environment works with the Python that made it"


def test_runs_without_root_and_without_a_shell(dockerfile: Dockerfile, service: str) -> None:
    final = dockerfile.final
    words = [word for word, _ in final.instructions]
    assert final.all("USER") == [f"{USER}:{USER}"]
    assert words.index("USER") > words.index("RUN"), "nothing runs as root at the end"
    assert final.last("WORKDIR") == "/app"
    command = dockerfile.entrypoint()
    assert command == ["python", "-m", STARTS[service][0]]
    assert importlib.util.find_spec(f"{command[2]}.__main__") is not None
    for run in final.all("RUN"):
        assert json.loads(re.sub(r"^(--\S+\s+)*", "", run)), "a base may have no shell"
    for check in final.all("HEALTHCHECK"):
        words = json.loads(check[check.index("[") :])
        assert importlib.util.find_spec(words[2]) is not None


def test_the_result_is_copied_from_the_builder_and_nothing_is_installed_in_it(dockerfile: Dockerfile) -> None:
    assert dockerfile.final.from_context() == []
    assert {text.split()[0] for text in dockerfile.final.all("COPY")} == {"--from=builder"}
    assert not [text for stage in dockerfile.stages for text in stage.all("ADD")]
    for text in dockerfile.final.all("RUN"):
        assert not re.search(r"\b(pip|apt-get|apk|curl|wget)\b", text)


def test_every_source_exists_and_is_let_into_the_build(dockerfile: Dockerfile) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    let_in = {line[1:] for line in lines if line.startswith("!")}
    sources = [source for stage in dockerfile.stages for source, _ in stage.from_context()]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in let_in, f"{source} is left out by .dockerignore"


def test_the_code_is_what_the_service_may_import_and_no_more(dockerfile: Dockerfile, service: str) -> None:
    copied = {
        source.replace("/", ".")
        for source, target in dockerfile.stages[1].from_context()
        if target.startswith("/app/") and (ROOT / source).is_dir() and not source.startswith("models")
    }
    wanted = {name for start in STARTS[service] for name in packages(start)}
    assert copied == wanted
    for source, target in dockerfile.stages[1].from_context():
        if (ROOT / source).is_dir() and target.startswith("/app/"):
            assert target == f"/app/{source}"


def test_environment_variables_are_settings(dockerfile: Dockerfile, service: str) -> None:
    known = {"gateway": GatewaySettings, "engine": EngineSettings}[service].model_fields
    ours = [name for name in dockerfile.final.pairs("ENV") if name.startswith("TEMPER_")]
    assert ours
    assert all(name.removeprefix("TEMPER_").lower() in known for name in ours)


def test_labels_and_version(dockerfile: Dockerfile) -> None:
    labels = dockerfile.final.pairs("LABEL")
    names = {"title", "description", "version", "revision", "created", "source", "licenses"}
    assert {f"org.opencontainers.image.{name}" for name in names} == labels.keys()
    assert dockerfile.final.pairs("ARG")["VERSION"] == project()["version"]
    assert labels["org.opencontainers.image.licenses"] == project()["license"]


def test_what_is_installed_is_pinned_and_binary(dockerfile: Dockerfile) -> None:
    (install,) = [text for text in dockerfile.stages[1].all("RUN") if " install " in text]
    for option in ("-c constraints.txt", "--only-binary=:all:", "--no-cache-dir", "id=pip.conf"):
        assert option in install


def test_no_index_and_no_secret_is_a_default(dockerfile: Dockerfile) -> None:
    for stage in dockerfile.stages:
        for text in stage.all("ARG"):
            assert not re.match(r"(PIP_|.*(TOKEN|SECRET|PASSWORD))\w*=", text)


def test_variants_are_extras_of_the_project() -> None:
    known = project()["optional-dependencies"]
    assert all(extra in known for extras in EXTRAS.values() for extra in extras)
    assert parse(FILES["engine"]).arguments["VARIANT"] in EXTRAS
