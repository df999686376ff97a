"""Asks OSV (osv.dev) what is known against the pinned versions; run by `make audit`.

exit status 0    nothing is known, or the service cannot be reached, which is said
exit status 1    something is known, or pip-audit itself failed
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

PINS = ("constraints.txt", "constraints-compilers.txt", "constraints-audit.txt")
SECONDS = 300  # one question for each of about 230 versions
COMMAND = (
    *(sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--timeout", "10"),
    # Pins are complete: nothing is resolved, and no package index is asked.
    *("--vulnerability-service", "osv", "--disable-pip", "--no-deps", "--desc", "off"),
    *(word for file in PINS for word in ("--requirement", file)),
)
# Names of errors, as Python prints them in front of a colon or as pip-audit repeats them.
UNREACHABLE = re.compile(r"\b(ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Could not connect)\b")


def verdict(code: int, out: str, err: str) -> tuple[int, str]:
    """Exit status and what to say.

    Args:
      code, out, err: of pip-audit: its exit status, its JSON, and what it said beside it.
    """
    try:
        report = json.loads(out)
    except ValueError:
        if UNREACHABLE.search(err):
            return 0, f"not audited: the service cannot be reached ({err.strip().splitlines()[-1][:200]})"
        return 1, f"pip-audit failed with exit status {code}:\n{err}"
    known = [
        f"{package['name']} {package.get('version', '')}: {advisory['id']}, mended in "
        f"{', '.join(advisory['fix_versions']) or 'no version'}"
        for package in report["dependencies"]
        for advisory in package.get("vulns", ())
    ]
    if known:
        return 1, "\n".join([f"expected no advisories against the pinned versions; got {len(known)}:", *known])
    return 0, f"{len(report['dependencies'])} pinned versions, nothing known against them"


def main() -> int:
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"not audited: the service did not answer everything within {SECONDS} s")
        return 0
    code, said = verdict(done.returncode, done.stdout, done.stderr)
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main())
