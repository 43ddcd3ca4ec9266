"""A plan that is known in part, as sections: what is known, and that the rest waits for the data."""

from __future__ import annotations

from typing import Any

from windlass.reports import plan as whole
from windlass.reports.plan import Section
from windlass.reports.text import compact, duration

PREPARE = "unknown until the data is prepared"
CONFIGURE = "unknown without the model's configuration"


def partial_sections(plan: dict[str, Any], command: str) -> list[Section]:
    """The sections of `windlass.estimate.partial.partial_plan`.

    Args:
        plan: its values.
        command: what prepares the data, as it is typed.
    """
    found = [_run(plan, command)]
    if plan.get("memory"):
        found += whole.memory_sections(plan)
    if plan.get("milestones"):
        found.append(whole.milestones_section(plan))
    return found


def _run(plan: dict[str, Any], command: str) -> Section:
    length, model, flops, time = plan["length"], plan["model"], plan.get("flops"), plan.get("time")
    missing = CONFIGURE if plan.get("note") else PREPARE
    ranks = f"{plan['world']} rank{'s' * (plan['world'] != 1)} on {plan['device']['name']}, {plan['precision']}"
    facts = [("ranks", ranks)]
    if model:
        parts = ", ".join(f"{k.replace('_', '-')} {v:,}" for k, v in model["parts"].items() if v)
        if model["parameters"] is None:
            known = f"{model['non_embedding']:,} in blocks and norms, and {model['parameters_of_an_id']:,} for each id"
            facts += [("parameters", f"{PREPARE}: {known}"), ("", parts)]
        else:
            shown = f"{model['parameters']:,} ({model['non_embedding']:,} of them in blocks and norms)"
            facts += [("parameters", shown), ("", parts)]
    a_step = f"{length['tokens_per_step']:,.0f} tokens a step"
    if length["steps"] is None:
        why = missing if length["setting"] == "compute-optimal" else PREPARE
        facts.append(("length", f'{why}: train.steps = "{length["setting"]}"; {a_step}'))
    else:
        facts.append(("length", f"{length['steps']:,} steps, {a_step}, {compact(length['tokens'])} tokens"))
    if flops:
        counted = f", {flops['per_token_counted']:.4g} counted" if flops["per_token_counted"] is not None else ""
        facts.append(("FLOPs", f"{flops['per_token']:.4g} a token{counted}; {flops['per_step']:.4g} a step"))
    else:
        facts.append(("FLOPs", missing))
    if time:
        facts.append(
            ("speed", f"{time['tokens_per_s']:,.0f} tokens/s, {1e3 * time['seconds_per_step']:,.0f} ms a step")
        )
        facts.append(("from", time["detail"]))
    facts.append(("time", duration(time["seconds"]) if time and "seconds" in time else PREPARE))
    if plan.get("checkpoint_bytes"):
        facts.append(("checkpoint", f"{plan['checkpoint_bytes'] / 1e6:,.0f} MB"))
    notes = [plan["note"]] if plan.get("note") else []
    notes += [f"The rest comes with the data: `{command}`, then this command again."]
    return Section(f"{plan['recipe']} ({plan['digest']})", facts, notes=notes)
