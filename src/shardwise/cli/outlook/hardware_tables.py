"""Tables of hardware in ``shardwise plan``: the list of names, this machine's calibration, a fit to measured steps."""

from pathlib import Path

import torch

from shardwise.base.errors import UsageError
from shardwise.base.hardware import Hardware
from shardwise.base.hardware_files import find_hardware, shipped_tables, write_hardware
from shardwise.base.words import bytes_text, counted
from shardwise.cli.outlook.planned_job import CPU, PlanRequest, check_new_file, job_of
from shardwise.engine.fit.foresee import JobFacts, read
from shardwise.observe.flops import flops_text
from shardwise.plan.plan import Plan
from shardwise.simulate.calibration import Calibration, calibration_file
from shardwise.simulate.price import step_seconds
from shardwise.simulate.refit import Refit, StepLine, read_lines, refit


def device_lines() -> list[str]:
    """Return a line for each hardware that is known by name."""
    said = [f"{CPU:<12} this machine"]
    for name in shipped_tables():
        found = find_hardware(name)
        peak = max(found.peaks.values())
        memory = bytes_text(found.memory_bytes["device"]) if "device" in found.memory_bytes else "-"
        said.append(f"{name:<12} {memory:>10}  {flops_text(peak)}/s at most")
    return said


def calibration_lines(found: Calibration) -> list[str]:
    """Return what a calibration has measured as lines for people."""
    hardware = found.hardware
    said = [f"{found.machine.processor}, {counted(found.machine.ranks, 'rank')}, torch {found.machine.torch}"]
    said += [
        f"  products in {dtype:<6} {flops_text(peak):>14}/s at most" for dtype, peak in hardware.peaks.items()
    ]
    said += [f"  {tier:<18} {rate / 1e9:>8.3g} GB/s" for tier, rate in hardware.memory_bytes_s.items()]
    link = hardware.links["host"]
    said.append(
        f"  between ranks      {link.bytes_s / 1e9:>8.3g} GB/s, {link.latency_s * 1e6:.3g} us a message"
    )
    said.append(f"  an operation       {hardware.operation_s * 1e6:>8.3g} us")
    said.append(f"  an Action          {hardware.action_s * 1e6:>8.3g} us")
    said.append(f"  one that ends      {hardware.ending_action_s * 1e6:>8.3g} us")
    said += [
        f"  {name:<18} {max(rate for _, rate in table) / 1e9:>8.3g} GB/s at most"
        for name, table in hardware.operations.items()
    ]
    return [*said, f"kept in {calibration_file()}"]


def refitted(lines: Path, device: str, out: Path) -> Refit:
    """Fit the table of a device to measured steps, and write the new table.

    Args:
        lines: File of measured steps, one JSON object a line.
        device: Name of the shipped table to begin with.
        out: File to write.
    """
    check_new_file("--write", out)
    jobs: dict[tuple[str, int], tuple[JobFacts, Plan]] = {}

    def price(line: StepLine, hardware: Hardware) -> float:
        key = line.config, line.ranks
        if key not in jobs:  # one pass on shapes and one Plan of each job, whatever the number of prices
            job = job_of(PlanRequest(line.config, ranks=line.ranks, device=line.device), line.config, "cuda")
            shapes = job.shapes
            known = read(shapes.make, shapes.config, job.ranks, torch.device("cuda"), shapes.example)
            if not known.passed:
                raise UsageError(
                    f"{lines}: the seconds of {line.config} cannot be foreseen: {known.unforeseen}"
                )
            jobs[key] = known, known.outlook(known.settings.offload).plan
        known, plan = jobs[key]
        policies = known.policies_with(known.settings.offload)
        return step_seconds(plan, policies, known.passed, hardware, "cuda", line.per_host).total

    found = refit(read_lines(lines), find_hardware(device), price)
    write_hardware(out, found.hardware)
    return found
