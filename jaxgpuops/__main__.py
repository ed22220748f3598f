"""``python -m jaxgpuops``: what is built and what it runs on, then the demo."""

from __future__ import annotations

from jaxgpuops import _demo
from jaxgpuops._inspect import info


def print_facts() -> None:
    facts = info()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def main() -> None:
    print_facts()
    print()
    _demo.main()


if __name__ == "__main__":
    main()
