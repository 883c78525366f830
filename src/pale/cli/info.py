"""Commands that describe a model or the machine: `pale info`, `pale cost`, `pale doctor`."""

from __future__ import annotations

from dataclasses import asdict

from ..tools.architecture import Architecture
from .options import Reporting, argument, option

MODELS = "pale_nano, pale_tiny, pale_small or pale_base"


class Cost(Reporting, Architecture, name="cost"):
    """Count parameters and multiply-adds, and compare them with the paper."""

    model: str = argument(f"{MODELS} (default pale_tiny)", default="pale_tiny")
    paper: bool = option("list every Pale row of the paper's tables, with the difference")

    def run(self) -> None:
        """Count and print."""
        from ..model.cost import reproduce
        from ..tools.info import count_in_all_ways, plain_costs
        from ..tools.tables import describe_cost, describe_paper

        if self.paper:
            rows = reproduce()
            plain = [asdict(row) | {"difference": row.difference} for row in rows]
            self.report(plain, describe_paper(rows))
            return
        config = self.config(self.model)
        ways = count_in_all_ways(config, self.size, self.in_chans, self.num_classes)
        about = {"model": self.model, "config": asdict(config), "size": self.size}
        title = f"{self.model}, {self.size[0]}x{self.size[1]}"
        table = describe_cost(title, len(config.depths), ways)
        self.report(about | {"counting": plain_costs(ways)}, table)


class Info(Reporting, Architecture, name="info"):
    """Show the stages of a model: maps, groups, tokens, cost and memory."""

    model: str = argument(MODELS)

    def run(self) -> None:
        """Describe and print."""
        from ..tools.info import describe
        from ..tools.tables import describe_stages

        config = self.config(self.model)
        about = describe(self.model, config, self.size, self.in_chans, self.num_classes)
        self.report(about, describe_stages(about))


class Doctor(Reporting, name="doctor"):
    """Show versions and devices, and which back-end runs on each device and why."""

    def run(self) -> None:
        """Examine and print."""
        from ..tools.doctor import examine
        from ..tools.tables import describe_machine

        facts = examine()
        self.report(facts, describe_machine(facts))
