"""Methods: the published methods that can be adopted, in the order in which they are looked for."""

from __future__ import annotations

from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.adopt.bita import BITA
from spaceport.tools.adopt.gated_lora import GATED_LORA
from spaceport.tools.adopt.given import Given
from spaceport.tools.adopt.medusa import MEDUSA
from spaceport.tools.adopt.nemotron import NEMOTRON
from spaceport.tools.adopt.other_layouts import refuse_other_layouts
from spaceport.tools.adopt.pard import PARD
from spaceport.tools.adopt.plan import Method
from spaceport.tools.adopt.ssd import SSD
from spaceport.tools.adopt.uno import UNO

METHODS = (MEDUSA, SSD, BITA, PARD, UNO, NEMOTRON, GATED_LORA)


def find_method(given: Given) -> tuple[Method, str]:
    """The method of what was given, and what shows it."""
    refuse_other_layouts(given)
    requested = given.request.method
    names = [method.name for method in METHODS]
    if requested is not None and requested not in names:
        raise OptionFault(f"--method is {requested!r}: expected one of {', '.join(names)}")
    tried = [method for method in METHODS if requested in (None, method.name)]
    for method in tried:
        evidence = method.recognize(given)
        if evidence is not None:
            return method, evidence
    raise CheckpointError(_nothing_found(given, tried[0].expected if requested is not None else None))


def _nothing_found(given: Given, expected: str | None) -> str:
    if expected is not None:
        return (
            f"{given.adapter or given.checkpoint}: has nothing of --method {given.request.method}: expected {expected}; "
            "name the path of these weights, or leave --method out"
        )
    if given.adapter is None:
        return (
            f"{given.checkpoint}: config.json names no mask token: expected pard_token, ptd_token_id or mask_token_id in it, "
            "or an adapter as second path; a checkpoint without one drafts with prompt lookup only, or can be trained "
            "with `spaceport tune`"
        )
    return (
        f"{given.adapter}: no mask token is known, and no noise: expected mask_token_id in a config.json beside the adapter "
        "or in the folder above it; else give --mask-token for an adapter that acts on mask tokens (I-DLM), or --method uno "
        "for one that acts on random tokens"
    )
