"""`check`, `doctor` and `preflight`: each runs scripts, tests or compilers in processes of their own, and reports.

commands.py has their options. A user's script runs with changed trainers, and saves nothing (user_script.py).
check_watch.py is in the process of a checked script; check_findings.py and check_report.py say what was seen.
preflight.py has steps traced on tensors without memory (trace_process.py, with a `StepCapture` for each runtime) and
compiled (tpu_compiler.py), and reports (preflight_report.py). save_programs.py compiles all that a run will compile.
"""
