from pathlib import Path

import pytest

from stretto.base.locations import check_location, check_url, is_allowed
from stretto.errors import ConfigError


@pytest.mark.parametrize(
    ("location", "allowed"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("s3://bucket/run/step", "s3://bucket/run/"),
        ("s3://bucket/run", "s3://bucket"),
        ("https://host/a/b", "https://host/a"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket"),
    ],
)
def test_a_url_and_everything_below_it_is_allowed(location: str, allowed: str) -> None:
    assert is_allowed(location, ["gs://other", allowed])
    assert check_location(location, "config.toml", [allowed]) == location


@pytest.mark.parametrize(
    ("location", "allowed"),
    [
        ("s3://bucket-of-another", "s3://bucket"),
        ("s3://bucket/running", "s3://bucket/run"),
        ("s3://bucket", "s3://bucket/run"),
        ("s3://bucket/run/../other", "s3://bucket/run"),
        ("https://host/a/%2e%2e/b", "https://host/a"),
        ("zip://a/b::s3://bucket/other.zip", "zip://a"),
        ("simplecache::s3://bucket/run", "s3://bucket"),
        ("gs://bucket/run", "s3://bucket/run"),
        ("s3://bucket/run", ""),
        ("s3://bucket/run", "/"),
        ("file:///etc", "/etc"),
        ("/etc", "file:///etc"),
        ("/etc\0", "/etc"),
    ],
)
def test_another_location_is_refused(location: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=r"^config\.toml: save\.to refers to '.*', which is outside the folder; if "):
        check_location(location, "config.toml: save.to", [allowed])


def test_a_path_is_inside_a_folder_only_if_its_links_are(tmp_path: Path) -> None:
    (tmp_path / "run" / "own").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    run = str(tmp_path / "run")
    assert is_allowed(f"{run}/own", [run]) and is_allowed(run, [run]) and is_allowed(f"{tmp_path}/alias/own", [run])
    assert not is_allowed(f"{run}/link", [run]) and not is_allowed(f"{run}/../other", [run])
    assert not is_allowed(f"{run}-2", [run])


def test_only_urls_need_permission_where_any_path_is_fine() -> None:
    assert check_url("/anywhere", "claim", []) == "/anywhere"
    with pytest.raises(ConfigError, match="claim refers to 's3://bucket/run'"):
        check_url("s3://bucket/run", "claim", [])


def test_a_path_that_can_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^claim refers to '/a\\x00b', which is outside the folder; if "):
        check_url("/a\0b", "claim", ["/"])


@pytest.mark.parametrize(
    ("location", "allowed", "opened"),
    [
        ("https://host/a/b", "https://me:pw@host/a/", "https://me:pw@host/a/b"),
        ("https://another:user@host/a/b", "https://me:pw@host/a", "https://me:pw@host/a/b"),
        ("https://another:user@host/a/", "https://me:pw@host/a", "https://me:pw@host/a/"),
    ],
)
def test_a_url_is_opened_with_the_secrets_that_the_user_has_typed(location: str, allowed: str, opened: str) -> None:
    assert check_location(location, "config.toml", ["s3://other", allowed]) == opened


def test_an_at_sign_in_a_query_does_not_name_the_host() -> None:
    with pytest.raises(ConfigError, match=r"^config\.toml refers to 'https://another', which is outside the folder"):
        check_location("https://another?@host/a", "config.toml", ["https://host/a"])


def test_an_error_about_a_url_with_a_password_says_that_it_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"with allowed_locations='https://host/a' and its password$"):
        check_location("https://me:pw@host/a", "config.toml", ["https://host/b"])
