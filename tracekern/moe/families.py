"""The bundled families of kernels: every package of tracekern.moe that has a FAMILY."""

from __future__ import annotations

import importlib
import pkgutil

from tracekern import moe
from tracekern.moe.family import Family, Option


def _find_families() -> dict[str, Family]:
    names = sorted(found.name for found in pkgutil.iter_modules(moe.__path__) if found.ispkg)
    packages = [importlib.import_module(f"tracekern.moe.{name}") for name in names]
    return {package.FAMILY.name: package.FAMILY for package in packages if hasattr(package, "FAMILY")}


FAMILIES = _find_families()
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
