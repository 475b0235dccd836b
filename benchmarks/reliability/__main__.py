"""`python -m benchmarks.reliability CAMPAIGN ...`: runs a campaign; without a name, lists them."""

import importlib
import pkgutil
import sys

import benchmarks.reliability

SHARED = {"__main__", "calls", "command", "input_cases", "runs"}


def main() -> int:
    """Calls the `main` of the campaign that the first argument names, with the other arguments."""
    names = {x.name for x in pkgutil.iter_modules(benchmarks.reliability.__path__)} - SHARED
    campaigns = {x: importlib.import_module(f"benchmarks.reliability.{x}") for x in sorted(names)}
    name, *argv = sys.argv[1:] or [""]
    if name not in campaigns:
        print("python -m benchmarks.reliability CAMPAIGN [--cases=N] [--seed=S]\n")
        for other, module in campaigns.items():
            print(f"  {other:<14} {module.__doc__.partition(chr(10))[0]}")
        return 0 if name in ("", "-h", "--help") else 2
    return campaigns[name].main(argv) or 0


if __name__ == "__main__":
    sys.exit(main())
