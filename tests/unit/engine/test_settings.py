from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.errors import InvalidRequest
from services.engine.models.registry import read_config
from services.engine.settings import MOST_DRAFTED_ON_GPU, EngineSettings
from services.pod.parts.tiers import cache_identity, tier_limits


def test_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPER_MODEL", "/data/model")
    monkeypatch.setenv("TEMPER_KV_CACHE_BYTES", "2GiB")
    settings = EngineSettings()
    assert str(settings.model) == "/data/model"
    assert settings.kv_bytes_on_cpu == 2 * 1024**3


def test_auto_device() -> None:
    settings = EngineSettings()
    assert settings.resolved_device(cuda_available=False) == "cpu"
    assert settings.resolved_device(cuda_available=True) == "cuda"


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="TEMPER_DEVICE"):
        EngineSettings(device="cuda").resolved_device(cuda_available=False)


def test_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ValidationError, match="token_budget"):
        EngineSettings(token_budget=8, max_num_seqs=16)


def test_zero_means_by_device() -> None:
    cpu, cuda = EngineSettings().for_device("cpu"), EngineSettings().for_device("cuda")
    assert (cpu.max_num_seqs, cpu.token_budget, cpu.mixed_prefill_tokens) == (64, 512, 512)
    assert (cuda.max_num_seqs, cuda.token_budget, cuda.mixed_prefill_tokens) == (256, 8192, 3840)
    assert (cpu.prefill_float8_rows, cuda.prefill_float8_rows) == (64, 1024)


def test_caches_of_prompts_that_are_computed_otherwise_are_others() -> None:
    """Engines share the store's entries by this name; without the option it is what it was before there was one."""
    config = read_config(Path("models/tiny"))
    given = (
        {},
        {"prefill_float8": "mlp"},
        {"prefill_float8": "all"},
        {"prefill_float8": "all", "prefill_float8_rows": 9},
    )
    names = [cache_identity(EngineSettings(**each).for_device("cpu"), config, "digest") for each in given]
    assert len(set(names)) == len(names)
    assert names[0] == cache_identity(EngineSettings(prefill_float8_rows=9).for_device("cpu"), config, "digest")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("given", [{"max_num_seqs": 4096}, {"token_budget": 8}, {"max_num_seqs": 3, "token_budget": 3}])
def test_what_is_given_stays(given: dict[str, int], device: Literal["cpu", "cuda"]) -> None:
    filled = EngineSettings(**given).for_device(device)
    assert {name: getattr(filled, name) for name in given} == given
    assert filled.token_budget >= filled.max_num_seqs > 0


def test_speculation_keeps_the_limits_and_has_its_own() -> None:
    for device in ("cpu", "cuda"):
        assert EngineSettings(speculative="mtp").for_device(device) == EngineSettings().for_device(device).model_copy(
            update={"speculative": "mtp"}
        )
        assert EngineSettings(draft_tokens=2).for_device(device).draft_tokens == 2
    assert EngineSettings().for_device("cuda").draft_tokens == MTP_FORM.most_tokens == 4
    for number in (-1, 5, 17):
        with pytest.raises(ValidationError, match="draft_tokens"):
            EngineSettings(draft_tokens=number)
    block = EngineSettings(speculative="mtp", drafter="./block", draft_tokens=8)
    with pytest.raises(InvalidRequest, match=r"8, and an mtp layer proposes at most 4: lower TEMPER_DRAFT_TOKENS"):
        block.drafting_with(MTP_FORM)
    assert block.drafting_with(DrafterForm(16)).for_device("cpu").draft_tokens == 8
    left = EngineSettings(speculative="mtp", drafter="./block").drafting_with(DrafterForm(12, 2))
    assert (left.drafter_form, left.for_device("cpu").draft_tokens) == (DrafterForm(12, 2), 12)
    assert left.for_device("cuda").draft_tokens == MOST_DRAFTED_ON_GPU
    with pytest.raises(ValidationError, match="batch_invariant and speculative contradict"):
        EngineSettings(speculative="mtp", batch_invariant=True)


def test_a_drafter_is_a_directory_or_a_name() -> None:
    here = EngineSettings(speculative="mtp", drafter="./sharp")
    assert (here.drafter_directory, here.followed_drafter) == (Path("sharp"), None)
    for text, followed in (("sharp", ("sharp", None)), ("sharp@3", ("sharp", 3)), ("", None)):
        named = EngineSettings(speculative="mtp", drafter=text)
        assert (named.drafter_directory, named.followed_drafter) == (None, followed)
    with pytest.raises(ValidationError, match="TEMPER_SPECULATIVE=mtp"):
        EngineSettings(drafter="sharp")
    with pytest.raises(ValidationError, match=r"as in \./no name"):
        EngineSettings(speculative="mtp", drafter="no name")


def test_the_kernel_cache_is_a_full_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EngineSettings().kernel_cache_dir == tmp_path / ".cache/temper/triton"
    assert EngineSettings(cache_dir=tmp_path / "x").kernel_cache_dir == tmp_path / "x" / "triton"


def test_no_home_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="TEMPER_CACHE_DIR"):
        _ = EngineSettings(cache_dir=Path("~nobody-of-that-name/cache")).kernel_cache_dir


def test_secrets_do_not_print() -> None:
    settings = EngineSettings.model_validate({"redis_url": "redis://:hunter2@host:6379/0"})
    assert "hunter2" not in repr(settings)


def test_tiers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert EngineSettings().tiers == "host"
    assert EngineSettings(tiers=" store,host , disk").tiers == "host,disk,store"
    assert EngineSettings(tiers="").tiers == ""
    with pytest.raises(ValidationError, match="no tier tape; the tiers are host, disk, store"):
        EngineSettings(tiers="host,tape")
    with pytest.raises(ValidationError, match="tier_disk_bytes"):
        EngineSettings(tier_disk_bytes=0)
    monkeypatch.setenv("TEMPER_TIER_DISK_DIR", "")
    assert EngineSettings(cache_dir=tmp_path).tier_directory == tmp_path / "prefix-cache"
    assert EngineSettings(tier_disk_dir=tmp_path / "x").tier_directory == tmp_path / "x"


def test_memory_of_the_tiers() -> None:
    gib = 2**30
    assert EngineSettings().tier_host_memory("cpu", 100 * gib) == gib // 4
    assert EngineSettings().tier_host_memory("cuda", 128 * gib) == 16 * gib
    assert EngineSettings().tier_host_memory("cuda", 1000 * gib) == 32 * gib
    assert EngineSettings(tier_host_bytes="3GiB").tier_host_memory("cuda", 128 * gib) == 3 * gib


def test_limits_of_the_tiers(tmp_path: Path) -> None:
    assert tier_limits(EngineSettings(tiers=""), "cpu", 2**30) is None
    limits = tier_limits(EngineSettings(tiers="disk", tier_disk_dir=tmp_path, tier_disk_bytes="1GiB"), "cuda", 2**33)
    assert limits is not None
    assert (limits.host, limits.host_bytes, limits.host_rate) == (False, 2**30, 40e9)
    assert (limits.disk_dir, limits.disk_bytes, limits.store) == (tmp_path, 2**30, False)
    both = tier_limits(EngineSettings(tiers="host,store"), "cpu", 2**33)
    assert both is not None
    assert (both.host, both.host_bytes, both.disk_dir, both.store) == (True, 2**28, None, True)
