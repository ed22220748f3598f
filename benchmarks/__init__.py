"""Benchmarks: ``python -m benchmarks <family>`` measures, ``table`` and ``plot`` show what was measured.

A family is one module here that offers ``cases(platform)``; see `benchmarks.runner.Case`, and topk.py as the example.
"""
