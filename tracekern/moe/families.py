"""Finds the bundled families of kernels and kinds of experts: the packages of tracekern.moe with FAMILY or EXPERTS."""

from __future__ import annotations

import importlib
import pkgutil

from tracekern import moe
from tracekern.moe.experts import SCALE, ExpertKind
from tracekern.moe.family import Family, Option

_PACKAGES = [
    importlib.import_module(f"tracekern.moe.{name}")
    for name in sorted(found.name for found in pkgutil.iter_modules(moe.__path__) if found.ispkg)
]
FAMILIES: dict[str, Family] = {
    package.FAMILY.name: package.FAMILY for package in _PACKAGES if hasattr(package, "FAMILY")
}
EXPERT_KINDS: dict[str, ExpertKind] = {
    kind.name: kind for kind in (SCALE, *(package.EXPERTS for package in _PACKAGES if hasattr(package, "EXPERTS")))
}
"""What `run moe --expert` takes."""
FAMILY_OF = {variant: family for family in FAMILIES.values() for variant in family.variants}
"""Variant -> its family."""
PLAIN_VARIANTS = ("reference", "sorted")
"""Variants in plain torch, which belong to no family (tracekern.moe.reference)."""
VARIANTS = (*PLAIN_VARIANTS, *FAMILY_OF)


def all_options() -> list[Option]:
    """Returns the options of all families; a name that two families use is one option."""
    return list({option.name: option for family in FAMILIES.values() for option in family.options}.values())


def takes_option(variant: str, name: str) -> bool:
    """Returns whether a variant of any family takes the option `name`."""
    return variant in FAMILY_OF and name in {option.name for option in FAMILY_OF[variant].options_of(variant)}


def reference_name(variant: str) -> str:
    """Returns the name of the plain torch function whose result this variant promises bit by bit."""
    return FAMILY_OF[variant].reference_name(variant) if variant in FAMILY_OF else "reference"
