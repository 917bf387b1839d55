"""The table of Tinker's SDK in the guide: every public method of its clients, each once."""

from __future__ import annotations

import re

import pytest
import tinker

from tests.stack import ROOT

ROWS = re.findall(r"^\| `(\w+)\.(\w+)` \| (.+) \|$", (ROOT / "docs" / "guides" / "tinker.md").read_text(), re.MULTILINE)
CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_public_method_is_in_the_table(client: type) -> None:
    public = {name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))}
    twins = {name for name in public if name.removesuffix("_async") in public - {name}}
    listed = [method for owner, method, _ in ROWS if owner == client.__name__]
    assert sorted(listed) == sorted(public - twins)
    assert all(re.match("works|refused|in the client|as of", said) for owner, _, said in ROWS)
