"""A small part of the campaign of faults; `make faults` runs the whole."""

import subprocess
import sys

import pytest
from conftest import ROOT

# Kind -> share of the campaign, so that all together take about three minutes.
SHARES = {
    "kill": 0.04,
    "terminate": 0.1,
    "devices": 0.05,
    "save": 0.1,
    "disk": 0.15,
    "checkpoint": 0.1,
    "first_runs": 0.1,
    "non_finite": 0.14,
    "outage": 0.15,
    "ending": 0.1,
}


@pytest.mark.parametrize("kind", SHARES)
def test_faults_are_survived(kind: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "faults" / "campaign.py"), kind, "--scale", str(SHARES[kind])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
