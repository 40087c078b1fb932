"""Attacks on real machines. What an attack has shown once stays shown: each finding, where it is tested, and as whom.

Root runs all of it. `functional/test_ordinary_user.py` repeats what has "both" below as an ordinary user: the tests
marked `rights`. `functional/test_selftest.py` repeats the cases of `mcp-sandbox selftest --security`, on the driver
whose machines share the host's kernel. What an agent sends, and the inside of a machine with its own kernel, are the
same for every user. What needs no machine and does not depend on rights is a unit test.

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
9  floods of events               test_hostile_agents, _streams (1)                 guest_floods, guest_reports
10 long listings                  test_hostile_code: "long"                         listings
11 requests that cost the machine test_hostile_code: "bounds"                       functional/test_guest_bad_requests
12 system calls in the machine    test_guest_filter, test_bubblewrap_calls   both   guest_seccomp
13 garbage before the greeting    test_garbage                                      guest_protocol, guest_floods
   memory limits and `setsid`     functional/test_compiled_templates                functional/test_compiled_cpp
   text in status lines           test_hostile_agents: "short_line"                 guest_reports, fuzz_guest
   deep JSON, batches                                                               stdio, http_messages, fuzz_http

(1) Not on QEMU: what its machines start from has no archive whose agent a test could replace.

Each fix below was taken out, and the test was seen to fail; "unit" and "functional" are folders.

   fix                                              fails without it
1  private /tmp, /var/tmp, /dev/shm                 unit/test_template_namespaces: "temporary_files_are_private"
   private /run/user                                unit/test_template_namespaces: "directory_of_users"
   removal by descriptors                           unit/test_template_removal: "right_before_it_is_opened"
2  what a project may set                           unit/test_settings: "neither_run_code"
   files that others could change                   unit/test_vmm_trust
3  an empty environment                             unit/test_template_namespaces: "operators_environment"
4  working directory, environment of machines       unit/test_vmm_process: "working_directory", "our_environment"
5  the umask; a home that is closed                 test_private_home: "whatever_the_umask"; "is_closed", "lock_a_home"
   sizes while unpacking; free disk before          functional/test_image_limits; unit/test_template_disk: "no_room"
6  limit of the cgroup                              unit/test_vmm_gvisor, test_confined_gvisor: "memory_cpu"
   without cgroups: the sentry; the server's look   test_confined_gvisor: "sentry_as_large"; "server_ends"
   the same look at bubblewrap                      functional/test_bubblewrap: "without_cgroups"
7  quota; share of an idle sandbox                  unit/test_vmm_limits: "in_use_has"; test_cpu_share
   weight; niceness without cgroups                 test_cpu_share
8  what a process costs gVisor                      unit/test_guest_memory_watch: "costs_gvisors_kernel"
9  turns on the event loop                          unit/test_guest_floods: "take_turns", "rounds_apart"
   caps on events, paths, listings, displays        unit/test_guest_floods, unit/test_guest_client
   everything kept is counted                       unit/test_service_runs: "kept_of_a_run_counts"
10 pages of listings                                unit/test_listings: "page_by_page"
11 deep directories                                 functional/test_guest_bad_requests: "directories_deep"
   nonsense on the kernel's socket                  functional/test_guest_kernel: "nonsense"
   a deep build directory                           functional/test_compiled_cpp: "nested_more_deeply"
12 the filter is installed                          functional/test_guest_bad_requests: "namespaces"
   what it refuses                                  unit/test_guest_seccomp
13 garbage is bounded                               unit/test_guest_floods: "garbage"; unit/test_guest_protocol
   garbage is skipped only where it can be          test_garbage: "refused_at_once"
   all processes of a program count                 functional/test_compiled_cpp: "escapes"
   signals and other text in status lines           test_hostile_agents: "short_line"; unit/test_guest_reports
   what cannot be read as JSON is answered          unit/test_stdio: "parse_error"; unit/test_http_messages
"""
