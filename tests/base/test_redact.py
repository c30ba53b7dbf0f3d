"""`without_secrets` leaves neither passwords nor signatures in a text, and changes nothing else."""

import json
import time
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stretto.base.redact import redact, without_secrets
from stretto.errors import DataError

# As a URL may hold them: percent-encoded, except what RFC 3986 allows as it is; and a raw `@` or `"`, a usual mistake.
SECRETS = st.text(min_size=1, max_size=12).map(lambda text: "Zq7" + quote(text, safe="!$&'()*+,;=:@\"") + "7qZ")
PREFIXES = st.sampled_from(["https", "s3", "simplecache::https", "zip://inner.csv::ftp", "memory"])
PATHS = st.sampled_from(["", "/", "/a/b", "/a%20b/c.csv", "/v@2/x"])
TEMPLATES = st.sampled_from(
    ["{}", "data.train={}: it is missing; copy it", "'{}' (from {})", '{{"train": "{}"}}', "[{}]"]
)


@example("https", "Zq707qZ", None, "", "Zq7@7qZ", "{}")  # an `@` in the query is not the end of the login
@given(PREFIXES, SECRETS, st.none() | SECRETS, PATHS, st.none() | SECRETS, TEMPLATES)
def test_no_user_password_or_query_is_left_in_a_text(
    prefix: str, user: str, password: str | None, path: str, query: str | None, template: str
) -> None:
    login = user if password is None else f"{user}:{password}"
    url = f"{prefix}://{login}@host{path}" + ("" if query is None else f"?x=1&X-Amz-Signature={query}#end")
    text = without_secrets(template.format(url, url))
    assert "Zq7" not in text and "7qZ" not in text
    assert "@host" not in text and f"{prefix}://host{path}" in text
    assert without_secrets(text) == text


@given(PREFIXES, PATHS, TEMPLATES)
def test_a_text_without_secrets_is_unchanged(prefix: str, path: str, template: str) -> None:
    text = template.format(f"{prefix}://host{path}", "mail@host, why? /a@b")
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    "url",
    [
        *(f"{scheme}://container@account.host/x" for scheme in ("abfs", "abfss", "az", "oci", "wasb", "wasbs")),
        "github://org:repo@main/data",
        "simplecache::az://container@account/x",
        "s3://bucket/run#2",
    ],
)
def test_what_is_no_secret_stays(url: str) -> None:
    assert without_secrets(url) == url
    assert without_secrets(f"['{url}?sig=1', https://u:p@host]") == f"['{url}', https://host]"


@pytest.mark.parametrize("url", ["https://host/x#access_token=1", "https://u:p@host/x#a?b=1", "topaz://u:p@host/x"])
def test_fragments_and_logins_of_similar_schemes_are_removed(url: str) -> None:
    assert without_secrets(f"'{url}': it is missing") == f"'{url.partition(':')[0]}://host/x': it is missing"


@pytest.mark.parametrize("unit", ["a://", "a://?", "https://#", "a://b@/ ", "a://?) ", "@", "#", "/", ")", "a", "a "])
def test_a_long_hostile_text_takes_less_than_half_a_second(unit: str) -> None:
    for start, end in [("https://", "x"), ("a://?", "x"), ("https://b@", "?")]:
        text = start + unit * (200_000 // len(unit)) + end
        begin = time.process_time()
        without_secrets(text)
        assert time.process_time() - begin < 0.5, (start, end)


def test_secrets_are_removed_at_any_depth_and_other_values_stay() -> None:
    tree = {"a": [{"b": "https://u:p@host/x?y"}, 1, None, True], "c": ("s3://k:s@b", 2.5)}
    assert redact(tree) == {"a": [{"b": "https://host/x"}, 1, None, True], "c": ["s3://b", 2.5]}
    assert redact({"data": {"train": 'https://u:p w@host/x?sig=a b" c'}}) == {"data": {"train": "https://host/x"}}


def test_json_is_still_json() -> None:
    text = json.dumps({"train": "https://u:p@host/x?sig=1", "valid": "https://host/y?sig=2"})
    assert json.loads(without_secrets(text)) == {"train": "https://host/x", "valid": "https://host/y"}
    assert without_secrets('["https://u:p@h/x","s3://k:s@b"]') == '["https://h/x","s3://b"]'
    assert without_secrets('["https://u:p@h/x?sig=1","s3://k:s@b"]') == '["https://h/x"]'


def test_an_error_has_no_secrets() -> None:
    assert str(DataError("https://u:p@host/x?sig=1: it is missing")) == "https://host/x: it is missing"
