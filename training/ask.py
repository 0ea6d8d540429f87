"""The child of the infer step, in the train environment: one engine answers for the base and, one after the other, for every adapter.

It is `swift infer` itself (its arguments, template, batches and engines), asked once a policy instead of started once a policy: a start costs
20 s on two cores. Run as `python -m training.ask --adapters name=path … --result_path FOLDER/base.jsonl …`; each adapter's answers lie beside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.arguments import DeployArguments
from swift.infer_engine import AdapterRequest
from swift.pipelines.infer import SwiftInfer
from swift.tuners import Swift
from swift.utils import JsonlWriter

from training.arguments import BASE_NAME


class Ask(SwiftInfer):  # type: ignore[misc]
    args_class = DeployArguments
    """These of all ms-swift's know adapters by name, and load none of them into the base."""

    def run(self) -> Any:
        """Write `<policy>.jsonl` for each policy, in `swift infer`'s own form."""
        folder = Path(self.args.result_path).parent
        for name, path in {BASE_NAME: "", **self.args.adapter_mapping}.items():
            print(f"asking {name}", flush=True)
            self._become(name, path)
            self.jsonl_writer = JsonlWriter(str(folder / f"{name}.jsonl"))
            self.infer_dataset()

    def _become(self, name: str, path: str) -> None:
        if not path:
            return  # the base is asked first, before any adapter is there
        if self.args.infer_backend == "vllm":
            self.infer_kwargs["adapter_request"] = AdapterRequest(name, path)
            return
        # ms-swift's request for an adapter names it once, which PEFT refuses for a batch of several; made active, it serves any batch.
        engine = self.infer_engine
        engine.model = Swift.from_pretrained(engine.model, path, adapter_name=name)
        engine.model.set_adapter(name)


if __name__ == "__main__":
    Ask().main()
