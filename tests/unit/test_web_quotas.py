"""What an owner may use of the web, counted with a clock that tests set."""

from websearch.quotas import DAY_S, KNOWN_NAMES, Ledger, Quotas


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_owner_has_a_number_of_connections():
    ledger = Ledger(Quotas(connections=2))
    assert [ledger.connect("ada").allowed for _ in range(3)] == [True, True, False]
    assert ledger.connect("bob").allowed
    ledger.disconnect("ada")
    assert ledger.connect("ada").allowed


def test_an_owner_has_a_number_of_requests_a_minute_which_grows_back():
    clock = Clock()
    ledger = Ledger(Quotas(requests_per_minute=3), clock)
    assert [ledger.request("ada").rule for _ in range(4)] == ["quota"] * 3 + ["quota-requests"]
    assert ledger.request("bob").allowed
    clock.now += 20
    assert [ledger.request("ada").allowed for _ in range(2)] == [True, False]


def test_an_owner_has_a_number_of_bytes_a_day():
    clock = Clock()
    ledger = Ledger(Quotas(bytes_per_day=100), clock)
    assert [ledger.transfer("ada", 60), ledger.transfer("ada", 60)] == [True, False]
    assert ledger.request("ada").rule == "quota-bytes"
    assert ledger.transfer("bob", 60)
    clock.now += DAY_S
    assert ledger.request("ada").allowed


def test_owners_who_use_nothing_are_forgotten():
    clock = Clock()
    ledger = Ledger(Quotas(), clock)
    for number in range(1000):
        ledger.connect(str(number))
        ledger.disconnect(str(number))
    assert ledger._accounts == {}
    ledger.connect("ada")
    ledger.request("ada")
    ledger.disconnect("ada")
    assert list(ledger._accounts) == ["ada"]


def test_an_owner_looks_up_so_many_new_names_a_minute():
    clock = Clock()
    ledger = Ledger(Quotas(names_per_minute=2), clock)
    names = ("a.test", "b.test", "a.test", "c.test", "b.test")
    assert [ledger.look_up("ada", name).rule for name in names] == ["quota"] * 3 + ["quota-names", "quota"]
    assert ledger.look_up("bob", "c.test").allowed
    clock.now += 30
    assert ledger.look_up("ada", "c.test").allowed


def test_names_that_were_used_long_ago_are_new_again():
    ledger = Ledger(Quotas(names_per_minute=KNOWN_NAMES + 1), Clock())
    for number in range(KNOWN_NAMES + 1):
        assert ledger.look_up("ada", f"{number}.test").allowed
    assert ledger.look_up("ada", "1.test").allowed
    assert ledger.look_up("ada", "0.test").rule == "quota-names"
