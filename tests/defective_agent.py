"""An agent with a bug, used by import path."""

from typing import Any

from harbortrainer.trials.agent import TrainableTerminus2


class Defective(TrainableTerminus2):
    """Raises as soon as it runs."""

    async def run(self, *args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a defect of the harness")
