"""Which hosts a sandbox may reach: every refusal by its name."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from websearch.addresses import kind_of
from websearch.authority import Authority, BadAuthority, parse_authority
from websearch.client_hello import ClientHello
from websearch.policy import Policy, Request, Surroundings, decide, decide_name, decide_tls

PUBLIC = ip_address("93.184.216.34")

SPELLINGS = {
    "decimal": "2130706433:80",
    "decimal of a private address": "167772161:80",
    "octal": "0177.0.0.1:80",
    "octal with many zeros": "0000177.0.0.01:80",
    "octal in one number": "017700000001:80",
    "hexadecimal": "0x7f000001:80",
    "hexadecimal parts": "0x7f.0x0.0x0.0x1:80",
    "hexadecimal last part": "127.0.0.0x1:80",
    "upper-case hexadecimal": "0X7F.0.0.1:80",
    "an empty hexadecimal part": "127.0.0.0x:80",
    "two parts": "127.1:80",
    "three parts": "127.0.1:80",
    "one part": "0:80",
    "five parts": "127.0.0.0.1:80",
    "a leading zero": "127.0.0.01:80",
    "a part over 255": "256.0.0.1:80",
    "a final dot": "127.0.0.1.:80",
    "a final dot after a short form": "127.1.:80",
    "full-width digits": "\uff11\uff12\uff17.0.0.1:80",
    "full-width digits and dots": "\uff11\uff12\uff17\uff0e\uff10\uff0e\uff10\uff0e\uff11:80",
    "ideographic dots": "127\u30020\u30020\u30021:80",
    "half-width ideographic dots": "127\uff610\uff610\uff611:80",
    "circled digits": "\u2460\u2461\u2466.0.0.1:80",
    "superscript digits": "\u00b9\u00b2\u2077.0.0.1:80",
    "mathematical digits": "\U0001d7cf\U0001d7d0\U0001d7d5.0.0.1:80",
    "percent-encoded": "%31%32%37.0.0.1:80",
    "an address ending in a name's number": "example.com.1:80",
}
MALFORMED = {
    "percent-encoded dot": "127%2e0%2e0%2e1:80",
    "percent-encoded name": "ex%61mple.com:80",
    "a user name": "user@example.com:80",
    "a user name that looks like a host": "example.com@127.0.0.1:80",
    "no port": "example.com",
    "an empty port": "example.com:",
    "port zero": "example.com:0",
    "a port over 65535": "example.com:65536",
    "a port in full-width digits": "example.com:\uff18\uff10",
    "a signed port": "example.com:+80",
    "two ports": "example.com:80:80",
    "an empty host": ":80",
    "a dot": ".:80",
    "an empty label": "example..com:80",
    "a leading dot": ".example.com:80",
    "two final dots": "example.com..:80",
    "a label with a leading hyphen": "-a.example.com:80",
    "a space": "exa mple.com:80",
    "a null byte": "example.com\x00.org:80",
    "a line break": "example.com\r\nX-A: 1:80",
    "a slash": "example.com/a:80",
    "a backslash": "example.com\\@127.0.0.1:80",
    "a question mark": "example.com?:80",
    "a number sign": "example.com#:80",
    "an IPv6 address without brackets": "::1:80",
    "an IPv6 zone": "[fe80::1%eth0]:80",
    "an encoded IPv6 zone": "[fe80::1%25eth0]:80",
    "an open bracket": "[::1:80",
    "a name in brackets": "[example.com]:80",
    "an IPv4 address in brackets": "[127.0.0.1]:80",
    "a future IP version": "[v1.a]:80",
    "a label over 63 characters": f"{'a' * 64}.com:80",
    "a name over 253 characters": f"{'a.' * 130}com:80",
    "invalid punycode": "xn--a.com:80",
    "punycode of ASCII": "xn--example-.com:80",
    "a zero-width joiner": "exam\u200dple.com:80",
}
ADDRESSES = {
    "unspecified": "0.0.0.0 0.1.2.3 :: ::ffff:0.0.0.0",
    "loopback": (
        "127.0.0.1 127.255.255.254 ::1 ::ffff:127.0.0.1 ::ffff:7f00:1 64:ff9b::127.0.0.1 2002:7f00:1:: "
        "2001:0:7f00:1:0:0:f7f7:f7f7 2001:0:808:808:0:0:80ff:fffe ::ffff:0:127.0.0.1 ::127.0.0.1 "
        "2001:4860::5efe:7f00:1 2001:4860::200:5efe:7f00:1"
    ),
    "private": (
        "10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 ::ffff:10.0.0.1 64:ff9b::10.0.0.1 2002:a00:1:: "
        "2002:c0a8:1:: 64:ff9b::192.168.1.1"
    ),
    "cgnat": "100.64.0.1 100.127.255.255 ::ffff:100.64.0.1 64:ff9b::100.64.0.1",
    "link-local": "169.254.1.1 fe80::1 febf::1 ::ffff:169.254.1.1",
    "metadata": (
        "169.254.169.254 169.254.170.2 100.100.100.200 168.63.129.16 192.0.0.192 fd00:ec2::254 fd20:ce::254 "
        "::ffff:169.254.169.254 64:ff9b::169.254.169.254 2002:a9fe:a9fe:: ::ffff:168.63.129.16"
    ),
    "documentation": "192.0.2.1 198.51.100.1 203.0.113.1 2001:db8::1 3fff::1",
    "benchmarking": "198.18.0.1 198.19.255.255 2001:2::1",
    "multicast": "224.0.0.1 239.255.255.255 ff02::1 ff0e::1",
    "unique-local": "fc00::1 fd12:3456::1",
    "site-local": "fec0::1",
    "reserved": (
        "192.0.0.1 192.88.99.1 240.0.0.1 255.255.255.255 64:ff9b:1::1 100::1 2001:10::1 2001:20::1 5f00::1 4000::1 "
        "::8.8.8.8 8000::5efe:808:808"
    ),
}
OPEN = (
    "8.8.8.8 93.184.216.34 172.15.255.255 172.32.0.1 100.63.255.255 100.128.0.1 169.253.0.1 192.0.1.1 "
    "2606:2800:220:1::1 2a00:1450:4001::1 ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1 2001:4860:4860::8888 "
    "223.255.255.255 126.0.0.1"
)


def tunnel(host: str, port: int = 443) -> Request:
    return Request(parse_authority(f"{host}:{port}"), "tunnel")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_address_has_one_spelling(spelling):
    with pytest.raises(BadAuthority) as refusal:
        parse_authority(SPELLINGS[spelling])
    assert refusal.value.rule == "ip-notation"


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_host_or_port_is_refused(what):
    with pytest.raises(BadAuthority) as refusal:
        parse_authority(MALFORMED[what])
    assert refusal.value.rule == "host-syntax"


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.COM:443", "example.com"),
        ("example.com.:443", "example.com"),
        ("b\u00fccher.example:443", "xn--bcher-kva.example"),
        ("\uff25xample.com:443", "example.com"),
        ("xn--bcher-kva.example:443", "xn--bcher-kva.example"),
        ("my_bucket.example.com:443", "my_bucket.example.com"),
        ("8.8.8.8:443", "8.8.8.8"),
        ("[2001:4860:0:0::8888]:443", "2001:4860::8888"),
    ],
)
def test_a_host_gets_one_form(text, host):
    assert parse_authority(text).host == host


def test_a_host_without_a_port_gets_the_default_one():
    assert parse_authority("[::1]", 80) == Authority("::1", 80, ip_address("::1"))
    assert parse_authority("example.com", 80).port == 80


@given(st.text(max_size=40))
def test_a_parsed_authority_parses_to_itself(text):
    try:
        parsed = parse_authority(text, 443)
    except BadAuthority:
        return
    assert parse_authority(str(parsed)) == parsed
    assert str(parsed).isascii()


@pytest.mark.parametrize(("kind", "address"), [(k, a) for k, many in ADDRESSES.items() for a in many.split()])
def test_an_address_that_is_not_public_is_refused(kind, address):
    verdict = decide(Policy(), tunnel("example.com"), [ip_address(address)])
    assert (verdict.allowed, verdict.rule) == (False, f"address-{kind}")


@pytest.mark.parametrize("address", OPEN.split())
def test_a_public_address_is_allowed(address):
    assert decide(Policy(), tunnel("example.com"), [ip_address(address)]).allowed


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_never_better_in_an_ipv6_form(address):
    kind = kind_of(address)
    number = int(address)
    forms = [
        ip_address((0xFFFF << 32) | number),
        ip_address((0x64FF9B << 96) | number),
        ip_address((0x2002 << 112) | number << 80),
    ]
    assert [kind_of(form) for form in forms] == [kind] * 3


def test_one_bad_address_refuses_all():
    verdict = decide(Policy(), tunnel("example.com"), [PUBLIC, ip_address("10.0.0.1")])
    assert verdict.rule == "address-private"


def test_a_host_without_addresses_is_refused():
    assert decide(Policy(), tunnel("example.com"), []).rule == "no-address"


@pytest.mark.parametrize("literal", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"])
def test_an_address_in_place_of_a_name_is_decided_as_its_address(literal):
    request = tunnel(literal)
    assert request.authority.address is not None
    assert not decide(Policy(), request, [request.authority.address]).allowed


def test_the_hosts_own_addresses_are_refused():
    verdict = decide(Policy(), tunnel("example.com"), [PUBLIC], Surroundings(own={PUBLIC}))
    assert verdict.rule == "address-host"


@pytest.mark.parametrize("form", ["::ffff:93.184.216.34", "64:ff9b::93.184.216.34", "2002:5db8:d822::1"])
def test_the_hosts_own_address_is_refused_in_an_ipv6_form(form):
    own = Surroundings(own={PUBLIC})
    assert decide(Policy(), tunnel("example.com"), [ip_address(form)], own).rule == "address-host"
    assert decide(Policy(), tunnel(f"[{form}]"), [ip_address(form)], own).rule == "address-host"


def test_the_proxy_itself_is_refused():
    proxy = parse_authority("proxy.example.com:443")
    verdict = decide(Policy(), Request(proxy, "http"), [PUBLIC], Surroundings(bridge={proxy}))
    assert verdict.rule == "bridge"


def test_an_operator_may_allow_a_private_network_by_name():
    policy = Policy(networks={"office": "10.1.0.0/16"})
    assert decide(policy, tunnel("wiki.example.com"), [ip_address("10.1.2.3")]).rule == "network:office"
    assert decide(policy, tunnel("wiki.example.com"), [ip_address("10.2.2.3")]).rule == "address-private"


def test_no_network_of_an_operator_opens_metadata_services():
    policy = Policy(networks={"all": "0.0.0.0/0"})
    assert decide(policy, tunnel("example.com"), [ip_address("169.254.169.254")]).rule == "address-metadata"


@pytest.mark.parametrize(("host", "port", "address"), [("localhost", 8888, "127.0.0.1"), ("10.0.0.5", 80, "10.0.0.5")])
def test_a_service_of_the_operator_may_be_anywhere_and_opens_nothing_beside_it(host, port, address):
    policy = Policy(services={f"{host}:{port}"}, allow=())
    found = [ip_address(address)]
    literal = ip_address(address) if host == address else None
    own = Surroundings(own=found)
    assert decide(policy, Request(Authority(host, port, literal), "http"), found, own).rule == "service"
    assert not decide(policy, Request(Authority(host, port + 1, literal), "http"), found, own).allowed
    assert not decide(policy, Request(Authority("other.test", port), "http"), found, own).allowed
    metadata = [ip_address("169.254.169.254")]
    assert decide(policy, Request(Authority(host, port, literal), "http"), metadata).rule == "address-metadata"


@pytest.mark.parametrize("port", [1, 21, 22, 25, 53, 3128, 6379, 8080, 65535])
def test_ports_other_than_those_of_the_web_are_refused(port):
    assert decide(Policy(), tunnel("example.com", port), [PUBLIC]).rule == "port"


def test_an_operator_may_allow_further_ports():
    assert decide(Policy(ports={8080}), tunnel("example.com", 8080), [PUBLIC]).allowed


@pytest.mark.parametrize("host", ["example.com", "a.example.org", "b.a.example.org"])
def test_a_domain_in_the_allow_list_is_allowed(host):
    policy = Policy(allow=["example.com", "*.example.org"])
    assert decide(policy, tunnel(host), [PUBLIC]).rule.startswith("domain:")


@pytest.mark.parametrize(
    "host", ["example.org", "a.example.com", "notexample.org", "example.org.evil.net", "evil-example.com", "8.8.8.8"]
)
def test_a_domain_outside_the_allow_list_is_refused(host):
    policy = Policy(allow=["example.com", "*.example.org"])
    assert decide(policy, tunnel(host), [PUBLIC]).rule == "domain-not-allowed"


def test_an_empty_allow_list_allows_nothing():
    assert decide(Policy(allow=[]), tunnel("example.com"), [PUBLIC]).rule == "domain-not-allowed"


@pytest.mark.parametrize("host", ["example.com", "EXAMPLE.com.", "b\u00fccher.example", "x.tracker.net"])
def test_a_denied_domain_is_refused_even_if_it_is_allowed(host):
    policy = Policy(
        allow=["*.net", "example.com", "b\u00fccher.example"],
        deny=["example.com", "B\u00dcCHER.example", "*.tracker.net"],
    )
    assert decide(policy, tunnel(host), [PUBLIC]).rule == "domain-denied"


@pytest.mark.parametrize("pattern", ["", "*", "*.", "a b", "*.*.com", "ex*mple.com", "http://example.com", "a..b"])
def test_a_pattern_that_is_no_domain_is_an_error_of_the_settings(pattern):
    with pytest.raises(ValidationError, match=r"a domain is example\.com"):
        Policy(allow=[pattern])


@pytest.mark.parametrize(
    "host", ["localhost", "intranet", "printer.local", "metadata.google.internal", "db.lan", "1.0.0.10.in-addr.arpa"]
)
def test_names_of_private_networks_are_refused(host):
    assert decide_name(Policy(), tunnel(host)).rule == "host-internal"


def test_an_operator_may_allow_an_internal_name():
    assert decide_name(Policy(allow=["wiki.internal"]), tunnel("wiki.internal")).allowed


@pytest.mark.parametrize(
    "host",
    [
        "4f6e6520646179206f6c6420736563726574.evil.net",  # hex
        "jzxw4zjanfxg4ylmmvrxi4tbnzuwg43ffz.evil.net",  # base32
        "c2vjcmv0lwrhdgetmtizndu2nzg5mdeyma.evil.net",  # base64 in lower case
        f"{'a-long-name-' * 5}x.evil.net",
        "a.b.c.d.e.f.g.evil.net",
        "1234567890123456789012345678.evil.net",
    ],
)
def test_names_that_carry_data_are_refused_before_they_are_looked_up(host):
    assert decide_name(Policy(), tunnel(host)).rule == "dns-label"


@pytest.mark.parametrize(
    "host",
    [
        "raw.githubusercontent.com",
        "ec2-54-210-167-204.compute-1.amazonaws.com",
        "d111111abcdef8.cloudfront.net",
        "r4---sn-4g5e6nz7.googlevideo.com",
        "objects-origin-githubusercontent.example.com",
        "the-quick-brown-fox-jumps-over.example.com",
        "wwwinternationaltelecommunication.example.com",
        "xn--fiqs8sirgfmhk5ovn0a.example.com",
    ],
)
def test_ordinary_names_are_not_taken_for_data(host):
    assert decide_name(Policy(), tunnel(host)).allowed


def test_a_name_that_the_operator_wrote_out_may_be_long():
    host = "4f6e6520646179206f6c6420736563726574.storage.example.com"
    assert decide_name(Policy(allow=[host]), tunnel(host)).allowed
    assert decide_name(Policy(allow=["*.example.com"]), tunnel(host)).rule == "dns-label"


@pytest.mark.parametrize(
    ("hello", "rule"),
    [
        (None, "tls-missing"),
        (ClientHello(None, False), "tls-no-sni"),
        (ClientHello("other.example.com", False), "tls-sni-mismatch"),
        (ClientHello("example.com.evil.net", False), "tls-sni-mismatch"),
        (ClientHello("exa mple.com", False), "tls-sni-mismatch"),
        (ClientHello("", False), "tls-sni-mismatch"),
        (ClientHello("example.com", True), "tls-ech"),
    ],
)
def test_a_tunnel_whose_tls_does_not_fit_is_refused(hello, rule):
    verdict = decide_tls(Policy(), "example.com", hello)
    assert (verdict.allowed, verdict.rule) == (False, rule)


def test_a_tunnel_whose_server_name_is_its_host_is_allowed():
    assert decide_tls(Policy(), "example.com", ClientHello("Example.com", False)).allowed


def test_an_operator_may_allow_tls_without_a_name_and_encrypted_names():
    assert decide_tls(Policy(require_sni=False), "8.8.8.8", ClientHello(None, False)).allowed
    assert decide_tls(Policy(allow_ech=True), "example.com", ClientHello("example.com", True)).allowed
    assert not decide_tls(Policy(require_sni=False), "a.com", ClientHello("b.com", False)).allowed
