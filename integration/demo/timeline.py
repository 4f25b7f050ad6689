"""What each slot is at each step, as numbers and as a picture."""

from __future__ import annotations

from pathlib import Path

from ...pool import CheckpointIndex, Condition, Ledger

#: Codes of a slot in the timeline, with label and colour.
FREE, RUNNING, SHARED, CHECKPOINT, DRAINING = range(5)
LEGEND = (
    ("free", "#f2f2f2"),
    ("running request", "#3b75af"),
    ("checkpoint that requests run from", "#7f3fbf"),
    ("checkpoint", "#e59c2f"),
    ("released, step in flight", "#9aa5b1"),
)


class Timeline:
    """Samples the ledger once a step, when the step's rows are planned and before its fence has passed."""

    def __init__(self, ledger: Ledger, index: CheckpointIndex) -> None:
        self.ledger, self.index = ledger, index
        self.codes: list[list[int]] = []
        self.running: list[int] = []
        self.checkpoints: list[int] = []

    def record(self, running: int) -> None:
        """Takes a sample; `running` requests are admitted."""
        self.codes.append([self._code(slot) for slot in range(self.ledger.num_slots)])
        self.running.append(running)
        self.checkpoints.append(self.index.size)

    def _code(self, slot: int) -> int:
        record, condition = self.ledger.records[slot], self.ledger.condition(slot)
        if condition is Condition.FREE:
            return FREE
        if record.entry is not None:
            used = record.readers or record.read_step > self.ledger.done
            return SHARED if used else CHECKPOINT
        return RUNNING if record.owner is not None or record.readers else DRAINING

    @property
    def peak_slots(self) -> int:
        """Most slots that were not free at one step."""
        return max((sum(code != FREE for code in row) for row in self.codes), default=0)

    @property
    def peak_separate(self) -> int:
        """Slots that separate pools for requests and checkpoints need: each is sized for its own peak."""
        return max(self.running, default=0) + max(self.checkpoints, default=0)

    @property
    def peak_copies(self) -> int:
        """Slots that one pool needs in which a request and a checkpoint never share a slot."""
        return max((a + b for a, b in zip(self.running, self.checkpoints)), default=0)

    def draw(self, path: Path) -> None:
        """Writes the picture: slots over steps, and below it the slots in use against the other designs."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        import numpy as np
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(12, 7), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        codes = np.array(self.codes).T
        colours = ListedColormap([colour for _, colour in LEGEND])
        top.imshow(
            codes, aspect="auto", interpolation="nearest", cmap=colours, vmin=-0.5, vmax=len(LEGEND) - 0.5,
            origin="lower",
        )  # fmt: skip
        top.set(ylabel="slot", title="Who holds each slot of the state pool")
        top.yaxis.set_major_locator(MaxNLocator(integer=True))
        top.legend(
            handles=[Patch(color=colour, label=label) for label, colour in LEGEND], ncols=len(LEGEND), fontsize=8,
            loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False,
        )  # fmt: skip
        used = (codes != FREE).sum(0)
        copies = np.array(self.running) + np.array(self.checkpoints)
        bottom.plot(used, color=LEGEND[SHARED][1], label=f"this pool: peak {self.peak_slots}")
        bottom.plot(copies, color="#c44e52", linewidth=1, label=f"requests + checkpoints: peak {self.peak_copies}")
        bottom.axhline(
            self.peak_separate, color="black", linestyle=":", label=f"two pools, each at its peak: {self.peak_separate}"
        )
        bottom.set(xlabel="step", ylabel="slots", ylim=(0, None))
        bottom.legend(fontsize=8, loc="lower right")
        figure.savefig(path, dpi=110)
        plt.close(figure)
