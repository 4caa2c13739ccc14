"""A file of tenants says what each may keep, and is refused by the name of what is wrong in it."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from sessions.policy import Policy
from sessions.tenants import Policies

FILE = """
session_ttl = "90d"
quota = "10G"

[tenants.ann]
quota = "50G"
budget = 40_000_000_000

[tenants."bob.smith"]
rows_ttl = 3600.5
"""


def test_a_tenant_has_what_it_is_given_and_else_what_everyone_has() -> None:
    policies = Policies.parse(FILE, Policy(rows_ttl=7.0, quota=5))
    everyone = Policy(rows_ttl=7.0, quota=10**10, session_ttl=90 * 86400.0)
    assert policies.everyone == everyone
    assert policies.own == {
        "ann": Policy(rows_ttl=7.0, quota=5 * 10**10, budget=4 * 10**10, session_ttl=90 * 86400.0),
        "bob.smith": Policy(rows_ttl=3600.5, quota=10**10, session_ttl=90 * 86400.0),
    }


def test_an_empty_file_changes_nothing() -> None:
    assert Policies.parse("", Policy(quota=5)) == Policies(Policy(quota=5), {})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("quotta = 1", "quotta: no such field"),
        ("lease = 1", "lease: no such field"),
        ("[tenants.ann]\nquotta = 1", "tenants.ann.quotta: no such field"),
        ('quota = "much"', "quota: 'much' is no size"),
        ('session_ttl = "10G"', "session_ttl: '10G' is no duration"),
        ("quota = true", "quota: a number"),
        ("quota = [1]", "quota: a number"),
        ("quota = -1", "quota: '-1' is no size"),
        ("quota = nan", "quota: 'nan' is no size"),
        ("rows_ttl = inf", "rows_ttl: 'inf' is no duration"),
        ("tenants = 1", "tenants: tables are"),
        ("tenants.ann = 1", "tenants.ann: a table"),
        ('[tenants."../x"]', "tenants.../x: not a tenant name"),
        ("[ann]\nquota = 1", "ann: no such field"),
        ("quota = ", "no TOML"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=r"field|size|duration|number|TOML|tenant") as refused:
        Policies.parse(text)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
