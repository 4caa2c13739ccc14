"""What tenants may keep, and for how long: one policy for all, and others for some of them.

A file of tenants is TOML. What stands before the first table is for everyone, a table for one tenant:

    session_ttl = "90d"
    quota = "10G"

    [tenants.ann]
    quota = "50G"
    budget = "40G"
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from engine.errors import ConfigError, NameRefused
from sessions import amounts
from sessions.policy import Policy
from sessions.stores.base import check_tenant

TENANTS = "tenants"

#: What may be said of a tenant, and how it is read.
_FIELDS: Mapping[str, Callable[[str], float | int]] = {
    "quota": amounts.nbytes,
    "budget": amounts.nbytes,
    "rows_ttl": amounts.seconds,
    "session_ttl": amounts.seconds,
}


@dataclass(frozen=True, slots=True)
class Policies:
    """`everyone` is the policy of each tenant that has none of its own in `own`."""

    everyone: Policy = field(default_factory=Policy)
    own: Mapping[str, Policy] = field(default_factory=dict)

    def of(self, tenant: str) -> Policy:
        return self.own.get(tenant, self.everyone)

    @property
    def named(self) -> tuple[str, ...]:
        """Tenants with a policy of their own."""
        return tuple(sorted(self.own))

    @classmethod
    def parse(cls, text: str, base: Policy | None = None) -> Self:
        """What a file of tenants says, over `base`. Raises ConfigError, naming the field that is wrong."""
        try:
            said = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the file of tenants is no TOML: {error}") from None
        tables = said.pop(TENANTS, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"{TENANTS}: tables are [{TENANTS}.NAME]")
        everyone = _over(base or Policy(), said, "")
        own = {}
        for tenant, fields in tables.items():
            where = f"{TENANTS}.{tenant}"
            try:
                check_tenant(tenant)
            except NameRefused as error:
                raise ConfigError(f"{where[:60]}: {error}") from None
            if not isinstance(fields, dict):
                raise ConfigError(f"{where}: a table [{where}] is wanted")
            own[tenant] = _over(everyone, fields, f"{where}.")
        return cls(everyone, own)


def _over(policy: Policy, said: Mapping[str, Any], where: str) -> Policy:
    changed: dict[str, Any] = {name: _value(name, value, where) for name, value in said.items()}
    try:
        return replace(policy, **changed)
    except ConfigError as error:
        raise ConfigError(f"{where or 'everyone: '}{error}") from None


def _value(name: str, value: Any, where: str) -> float | int:
    read = _FIELDS.get(name)
    if read is None:
        raise ConfigError(f"{where}{name}: no such field; known are {', '.join(sorted(_FIELDS))}")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{where}{name}: a number, or a text like 10G or 30d, is wanted")
    try:
        return read(str(value))
    except ValueError as error:
        raise ConfigError(f"{where}{name}: {error}") from None
