from pathlib import Path

import pytest

from benchmarks.peers.candidates import OPENVINO, OURS, PEERS, SHORT, line_up, peers_named
from benchmarks.peers.install import PeerFolder


def test_short_names_stand_for_a_peer_at_its_best() -> None:
    assert peers_named("openvino, llama:q8_0") == ["openvino:f16", "llama:q8_0"]
    assert set(peers_named("all")) <= set(PEERS)
    assert len(peers_named("all")) >= len(SHORT)


@pytest.mark.parametrize("name", [name for name in PEERS if name.startswith("openvino")])
def test_every_form_of_openvino_says_how_it_multiplies(name: str) -> None:
    _, _, choice = name.partition("-")
    own_choice = not any(given.startswith("INFERENCE_PRECISION_HINT=") for given in OPENVINO[choice])
    assert own_choice == choice.startswith("own")


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="llama:q3"):
        peers_named("llama:q3")


def test_who_cannot_take_part_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OURS, "odd", {"no_such_setting": 1})  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", "")  # no cmake
    lineup = line_up(["fp32", "odd"], ["llama:q4_1"], PeerFolder(tmp_path), 2, {})
    assert [candidate.name for candidate in lineup.candidates] == ["headrace:fp32"]
    assert "no_such_setting" in lineup.missing["headrace:odd"]
    assert "cmake" in lineup.missing["llama:q4_1"]
