"""The notes after an installation name the pods and commands of that release."""

import pytest

from tests.operate.chart.manifests import helm

pytestmark = pytest.mark.operate

KEYS = ("--set", f"auth.apiKeys.hashes={{{'0' * 64}}}")


def notes(*values: str) -> str:
    """Return the notes of a release `llm-a` in the namespace `serving`, in one line."""
    done = helm("4.1").run(  # version 3.17 needs a cluster
        "install", "llm-a", ".", "--namespace", "serving", "--dry-run=client", *values
    )
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.rpartition("NOTES:")[2].split())


def test_notes_count_the_pods_of_all_sets_and_autoscalers() -> None:
    found = notes("--values", "ci/autoscaled-production-values.yaml")
    assert "pods by role: gateway 3 to 12, router 2, prefill 2 to 16, decode 2 to 16." in found
    found = notes("--values", "ci/model-change-values.yaml")
    assert "prefill 2, decode 2, prefill-green 2, decode-green 2." in found


def test_notes_offer_the_test_only_if_it_has_an_api_key() -> None:
    test = "helm -n serving test llm-a"
    assert test in notes()
    assert test in notes(*KEYS, "--set", "test.apiKeySecret.name=key")
    without = notes(*KEYS)
    assert test not in without
    assert "set test.apiKeySecret" in without


def test_notes_show_the_log_of_the_job_of_each_set() -> None:
    claim = "model.volume.persistentVolumeClaim.claimName"
    found = notes(
        "--set",
        f"{claim}=models,blueGreen.sets={{blue,green}},model.path=a,blueGreen.green.model.path=b,"
        "blueGreen.green.model.prepare.codebooks=true",
    )
    assert "A Job prepares the model of green;" in found
    assert "component=model-green" in found
    assert "the model of blue;" not in found
