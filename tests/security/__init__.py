"""Attacks on real machines. What an attack has shown once stays shown: each finding, where it is tested, and as whom.

Root runs all of it. `functional/test_ordinary_user.py` repeats what has "both" below as an ordinary user, and
`functional/test_selftest.py` the cases of `mcp-sandbox selftest --security`. A virtual machine is the same inside for
every user, so only its outside is tested twice. What needs no machine and does not depend on rights is a unit test.

finding                           on a real host                             users  without a machine
1  temporary files of builds      functional/test_template_build             both   template_removal, -namespaces
2  a repository's settings        test_private_home                          both   settings, vmm_trust
3  the operator's environment     functional/test_template_build: "secret"   both   template_namespaces
4  directories of the host        test_machine_processes, test_confined_*    both   vmm_process
5  modes and locks of the home    test_private_home                          both
   images that explode            functional/test_image_limits               both   template_disk
6  memory                         contract/test_limits, test_confined_*      both   vmm_memory, gvisor_memory
7  CPU                            test_cpu_share (no cgroups: niceness)      both   vmm_limits, service
   what is left running           test_hostile_code: "daemon"                both
8  forks                          contract/test_limits, test_hostile_code    both   guest_memory_watch
9  floods of events               test_hostile_agents, _streams (1)          both   guest_floods, guest_reports
10 long listings                  test_hostile_code: "long"                  both   listings
11 requests that cost the machine test_hostile_code: "bounds"                both   functional/test_guest_bad_requests
12 system calls in the machine    test_guest_filter, test_bubblewrap_calls   both   guest_seccomp
13 garbage before the greeting                                                      guest_protocol, guest_floods
   memory limits and `setsid`                                                       functional/test_compiled_cpp
   text in status lines                                                             guest_reports, fuzz_guest
   deep JSON, batches                                                               stdio, http_messages, fuzz_http

(1) The million frames as root only: what they cost the server does not depend on its user. Not on QEMU: what its
    machines start from has no archive whose agent a test could replace.
"""
