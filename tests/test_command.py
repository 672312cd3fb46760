"""What the commands share: how they end, whatever happens to their work."""

import signal

import pytest

from q0lib import command


def test_a_command_tells_how_it_ended(capsys):
    def ends(error: BaseException | None) -> int:
        def work() -> None:
            if error:
                raise error

        return command.status("it", work)

    assert command.status("it", lambda: 7) == 7
    assert ends(None) == 0
    assert ends(RuntimeError("no room")) == 1
    assert ends(FileNotFoundError("no file")) == ends(ValueError("no such")) == 2
    assert capsys.readouterr().err == "it: no room\nit: no file\nit: no such\n"
    assert ends(KeyboardInterrupt()) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_signals_stop_a_command_and_are_then_as_they_were(number):
    before = signal.getsignal(number)
    assert command.status("it", lambda: signal.raise_signal(number)) == 130
    assert signal.getsignal(number) == before


def test_a_command_under_nohup_goes_on_when_its_terminal_goes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert command.status("it", lambda: signal.raise_signal(signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
