"""The tiers' flags: what they become, and which combinations are refused with the flag to add or to drop."""

from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.config import CacheConfig, DiskSpec, options_from_mapping, resolve
from benthic.messages.start import EngineStart, ModelSource, decode_start, encode_start


def cache_of(options: dict[str, object], environ: dict[str, str] | None = None) -> CacheConfig:
    return resolve(options_from_mapping(options, "test"), environ or {}).engine.cache


def test_without_flags_there_is_l1_alone() -> None:
    cache = cache_of({})
    assert (cache.l2_bytes, cache.l2_policy, cache.l2_backing, cache.disk) == (0, "write_through", "auto", None)
    assert cache.max_slab_bytes == 480 << 30
    assert not cache.placement_assert


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_policies_with_underscores_or_dashes(policy: str) -> None:
    for written in (policy, policy.replace("_", "-")):
        cache = cache_of({"l2_size": "64GiB", "l2_policy": written})
        assert (cache.l2_bytes, cache.l2_policy) == (64 << 30, policy)


@pytest.mark.parametrize("backing", ["auto", "shm", "hugetlbfs", "hugetlbfs:/mnt/huge 1G"])
def test_backings(backing: str) -> None:
    assert cache_of({"l2_size": "1GiB", "l2_backing": backing}).l2_backing == backing


def test_the_simple_floor() -> None:
    disk = cache_of(
        {"l2_size": "1GiB", "l3_dir": "kv", "l3_size": "2GiB", "l3_cold_start": "clear", "l3_min_pages": 4}
    ).disk
    assert disk is not None
    assert disk.disks == (DiskSpec(path=Path.cwd() / "kv", budget_bytes=2 << 30),)
    assert (disk.cold_start, disk.min_pages) == ("clear", 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"l2_size": "0"}, "--l2-size 0: must be more than 0"),
        ({"l2_size": "1GiB", "l2_policy": "write_never"}, "--l2-policy write_never.*write_through_selective"),
        ({"l2_size": "1GiB", "l2_backing": "ram"}, "--l2-backing ram.*hugetlbfs"),
        ({"l2_size": "1GiB", "l2_backing": "shm:/dev/shm"}, "--l2-backing shm:/dev/shm"),
        ({"l2_size": "1GiB", "l2_backing": "hugetlbfs:"}, "--l2-backing hugetlbfs:"),
        ({"l2_policy": "write_back"}, "--l2-policy.*add --l2-size"),
        ({"l2_backing": "shm"}, "--l2-backing.*add --l2-size"),
        ({"l3_dir": "/kv", "l3_size": "1GiB"}, "--l3-dir needs a host tier.*add --l2-size"),
        ({"l3_config": "/none.toml"}, "--l3-config needs a host tier.*add --l2-size"),
        ({"l3_cold_start": "load"}, "--l3-cold-start needs a host tier.*add --l2-size"),
        ({"l2_size": "1GiB", "l3_dir": "/kv"}, "--l3-dir /kv.*add --l3-size"),
        ({"l2_size": "1GiB", "l3_size": "1GiB"}, "--l3-size 1GiB.*add --l3-dir"),
        ({"l2_size": "1GiB", "l3_min_pages": 3}, "--l3-min-pages.*add --l3-dir and --l3-size"),
        ({"l2_size": "1GiB", "l3_dir": "/kv", "l3_size": "0"}, "--l3-size 0: must be more than 0"),
        ({"l2_size": "1GiB", "l3_dir": "/kv", "l3_size": "1GiB", "l3_config": "f.toml"}, "--l3-dir beside --l3-config"),
        ({"l2_size": "1GiB", "l3_size": "1GiB", "l3_config": "f.toml"}, "--l3-size beside --l3-config"),
        ({"l2_size": "1GiB", "l3_dir": "/k", "l3_size": "1GiB", "l3_cold_start": "warm"}, "--l3-cold-start warm.*load"),
        ({"l2_size": "1GiB", "l3_dir": "/k", "l3_size": "1GiB", "l3_min_pages": 0}, "--l3-min-pages 0"),
    ],
)
def test_what_cannot_be_used_names_the_flag_and_the_remedy(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cache_of(options)


def test_the_environment_bounds_slabs_and_compares_digests() -> None:
    cache = cache_of({}, {"BENTHIC_MAX_SLAB_GIB": "0.25", "BENTHIC_PLACEMENT_ASSERT": "1"})
    assert cache.max_slab_bytes == 1 << 28
    assert cache.placement_assert
    assert not cache_of({}, {"BENTHIC_PLACEMENT_ASSERT": "0"}).placement_assert
    for wrong in ("0", "-1", "nan", "inf", "many"):
        with pytest.raises(ConfigError, match=f"BENTHIC_MAX_SLAB_GIB={wrong}.*above 0"):
            cache_of({}, {"BENTHIC_MAX_SLAB_GIB": wrong})


def test_a_file_names_several_disks_and_flags_win_over_its_cold_start(tmp_path: Path) -> None:
    file = tmp_path / "floor.toml"
    file.write_text(
        'cold_start = "load"\nqueue_depth = 4\n'
        'disks = [{path = "/ssd0/kv", size = "2GiB"}, {path = "/ssd1/kv", size = "1GiB"}]\n'
    )
    disk = cache_of({"l2_size": "1GiB", "l3_config": str(file), "l3_cold_start": "clear"}).disk
    assert disk is not None
    assert [(spec.path, spec.budget_bytes) for spec in disk.disks] == [
        (Path("/ssd0/kv"), 2 << 30),
        (Path("/ssd1/kv"), 1 << 30),
    ]
    assert (disk.cold_start, disk.queue_depth) == ("clear", 4)
    with pytest.raises(ConfigError, match=r"--l3-config .*none\.toml.*can't be read"):
        cache_of({"l2_size": "1GiB", "l3_config": str(tmp_path / "none.toml")})


def test_the_floor_travels_to_the_engine() -> None:
    options = options_from_mapping({"l2_size": "1GiB", "l3_dir": "/a b/ü", "l3_size": "2GiB"}, "test")
    order = EngineStart(
        config=resolve(options, {}).engine,
        source=ModelSource("gguf", Path("/m.gguf"), "m"),
        recv_addr="ipc:///x/a",
        send_addr="ipc:///x/b",
    )
    assert decode_start(encode_start(order)) == order
