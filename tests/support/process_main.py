"""Main program of one process that `processes.start` starts."""

import importlib.util
import json
import os
import sys


def main() -> None:
    job = json.loads(sys.argv[1])
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if job["join"]:
        from shardzoo.checkpoints import distributed

        coordinator, processes, process, timeout = job["join"]
        distributed.initialize(coordinator, processes, process, timeout=timeout, shutdown_timeout=4)
    spec = importlib.util.spec_from_file_location("workers_of_test", job["file"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    print("RESULT " + json.dumps(getattr(module, job["function"])(**job["arguments"])), flush=True)


if __name__ == "__main__":
    main()
