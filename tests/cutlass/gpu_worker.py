"""A tuning child whose GPU is a fake one: `python gpu_worker.py LIFE EVENTS`. The table lies beside the cache."""

from __future__ import annotations

import json
from pathlib import Path

from hone.tuning import worker


def run(spec, emit):
    from hone.kernels import DeviceKey, KernelsCache
    from hone.tuning.compile import CacheLedger
    from hone.tuning.gpu_compile import CudaCompile
    from hone.tuning.specialize import specialize_all
    from tests.fake_gpu import Sharing, parts_of
    from tests.running import wait_until

    folder = Path(spec["kernels_cache"])
    table = json.loads((folder.parent / "table.json").read_text(encoding="utf-8"))
    cache = Sharing(KernelsCache(folder), KernelsCache(Path(table["twins"])))
    device = DeviceKey(spec["device_fields"])
    with (folder.parent / "children").open("a+", encoding="utf-8") as children:
        children.write("child\n")
        children.seek(0)
        if len(children.readlines()) > table.get("num_broken", 0):
            table.pop("breaks_at", None)
    compile_step = CudaCompile(spec, cache, device, parts_of(table, cache))

    def told(event, **fields):
        """The plain module is the first to be measured; what comes behind it takes what the table says of that."""
        emit(event, **fields)
        if event == "specialized" and spec["tasks"][fields["index"]]["mode"] == "plain":
            if "wait_for" in table:
                wait_until((folder.parent / table["wait_for"]).exists, "told to go on")
            table["model_ns"] = table.get("searched_ns", table["model_ns"])

    specialize_all(spec, told, compile_step, CacheLedger(cache, device.digest))


if __name__ == "__main__":
    worker.main(run)
