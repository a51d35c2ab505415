//! Pods that do to their NIC what `CAP_NET_ADMIN` in their namespace allows: nothing of it
//! reaches the host or the next pod.

use anyhow::{Result, ensure};
use e2e::cases;
use e2e::host_state::{state, unchanged};
use e2e::scene::{Scene, answer_of};

cases! {
    the_transmit_queue_length_is_undone => does(&["link set net1 txqueuelen 3"]);
    an_mtu_is_undone => does(&["link set net1 mtu 300"]);
    a_mac_is_undone => does(&["link set net1 address 02:66:66:66:66:66"]);
    an_alias_is_undone => does(&["link set net1 alias eth0"]);
    an_emptied_alias_is_undone => does(&["link set net1 alias \\x0a"]);
    altnames_are_undone => does(&[
        "link property add dev net1 altname sneaky",
        "link property add dev net1 altname peer0",
        "link property del dev net1 altname enp59s0np0",
    ]);
    a_name_is_undone => does(&["link set net1 name mine"]);
    a_name_is_undone_while_the_link_is_down =>
        does(&["link set net1 down", "link set net1 name mine"]);
    the_name_of_another_host_link_is_undone => does(&["link set net1 name peer0"]);
    all_multicast_is_undone => does(&["link set net1 allmulticast on"]);
    multicast_off_and_arp_off_are_undone =>
        does(&["link set net1 multicast off", "link set net1 arp off"]);
    a_link_set_down_is_up_again => does(&["link set net1 down"]);
    address_generation_is_undone => does(&["link set net1 addrgenmode random"]);
    a_token_is_undone => does(&[
        "sysctl ipv6/conf/net1/accept_ra 1",
        "token set ::5 dev net1",
    ]);
    sysctls_are_undone => does(&[
        "sysctl ipv4/conf/net1/proxy_arp 1",
        "sysctl ipv4/conf/net1/forwarding 1",
        "sysctl ipv4/conf/net1/rp_filter 0",
        "sysctl ipv4/conf/net1/accept_local 1",
        "sysctl ipv4/neigh/net1/gc_stale_time 7",
        "sysctl ipv6/conf/net1/disable_ipv6 1",
        "sysctl ipv6/neigh/net1/ucast_solicit 9",
    ]);
    neighbours_are_undone => does(&[
        "neigh add 10.9.0.66 lladdr 02:66:66:66:66:66 dev net1 nud permanent",
        "neigh replace 10.9.0.254 lladdr 02:66:66:66:66:66 dev net1 nud permanent",
        "neigh add fd09::66 lladdr 02:66:66:66:66:66 dev net1 nud permanent",
    ]);
    proxy_neighbours_are_undone => does(&[
        "neigh add proxy 10.9.0.66 dev net1",
        "-6 neigh add proxy fd09::66 dev net1",
    ]);
    multicast_memberships_are_undone => does(&["maddr add 33:33:00:00:66:66 dev net1"]);
    addresses_routes_and_rules_are_undone => does(&[
        "addr add 10.66.0.1/16 dev net1",
        "addr del 10.9.0.1/24 dev net1",
        "route add default dev net1",
        "rule add pref 5 lookup 66",
        "route add default dev net1 table 66",
        "-6 route add default dev net1",
    ]);
    nexthop_objects_are_undone => does(&[
        "nexthop add id 66 via 10.9.0.66 dev net1",
        "route add 10.66.0.0/16 nhid 66",
    ]);
    a_root_qdisc_is_undone =>
        does(&["tc qdisc replace dev net1 root handle 66: tbf rate 1kbit burst 1540 latency 50ms"]);
    a_class_tree_is_undone => does(&[
        "tc qdisc replace dev net1 root handle 66: htb default 1",
        "tc class add dev net1 parent 66: classid 66:1 htb rate 1kbit",
        "tc filter add dev net1 parent 66: protocol ip u32 match ip dst 10.9.0.1/32 classid 66:1",
    ]);
    filters_of_clsact_are_undone => does(&[
        "tc qdisc add dev net1 clsact",
        "tc filter add dev net1 ingress protocol ip u32 match ip dst 10.9.0.1/32 classid 1:1",
        "tc filter add dev net1 egress bpf da obj {classifier} sec classifier",
    ]);
    an_ingress_qdisc_is_undone => does(&[
        "tc qdisc add dev net1 ingress",
        "tc filter add dev net1 parent ffff: protocol ip u32 match ip dst 10.9.0.1/32 classid 1:1",
    ]);
    an_xdp_program_is_undone => does(&["link set net1 xdpdrv obj {xdp} sec xdp"]);
    a_generic_xdp_program_is_undone => does(&["link set net1 xdpgeneric obj {xdp} sec xdp"]);
    no_link_that_is_moved_can_be_held_down_by_its_pod => protodown();
    a_bridge_of_the_pod_lets_it_go => does(&[
        "link add br0 type bridge",
        "link set net1 master br0",
    ]);
    a_macvlan_of_the_pod_upon_it_does_not_hold_it: Macvlan => does(&[
        "link add mv0 link net1 type macvlan mode bridge",
        "link set mv0 up",
        "addr add 10.9.0.66/24 dev mv0",
    ]);
    a_passthru_macvlan_of_the_pod_upon_it_does_not_hold_it: Macvlan => does(&[
        "link add mv0 link net1 type macvlan mode passthru",
        "link set mv0 address 02:66:66:66:66:66",
        "link set mv0 up",
    ]);
    a_vxlan_of_the_pod_upon_it_does_not_hold_it =>
        does(&["link add vx0 type vxlan id 66 dev net1 dstport 4789", "link set vx0 up"]);
    a_vlan_of_the_pod_upon_it_does_not_hold_it: Vlan =>
        does(&["link add vl0 link net1 type vlan id 66", "link set vl0 up"]);
    a_vrf_of_the_pod_lets_it_go: Vrf =>
        does(&["link add vrf0 type vrf table 66", "link set net1 master vrf0"]);
    all_of_it_at_once_is_undone_and_the_next_pod_sees_nothing_of_it => next_pod();
    all_of_it_at_once_is_undone_after_the_namespace_died => namespace_died();
}

/// Most of the above, in an order that the kernel accepts.
const EVERYTHING: &[&str] = &[
    "link set net1 down",
    "link set net1 name mine\\xff",
    "link set mine\\xff mtu 400 txqueuelen 3",
    "link set mine\\xff address 02:66:66:66:66:66",
    "link set mine\\xff alias \\xfe\\x1b[31m",
    "link property add dev mine\\xff altname nic0",
    "link property add dev mine\\xff altname \\xfd",
    "link set mine\\xff allmulticast on",
    "addr flush dev mine\\xff",
    "link set mine\\xff up",
    "neigh add 10.9.0.66 lladdr 02:66:66:66:66:66 dev mine\\xff nud permanent",
    "neigh add proxy 10.9.0.67 dev mine\\xff",
    "maddr add 33:33:00:00:66:66 dev mine\\xff",
    "tc qdisc add dev mine\\xff clsact",
    "tc filter add dev mine\\xff ingress bpf da obj {classifier} sec classifier",
    "tc qdisc replace dev mine\\xff root handle 66: tbf rate 1kbit burst 1540 latency 50ms",
    "link set mine\\xff xdpgeneric obj {xdp} sec xdp",
];

fn does(pod: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.returns(&scene.moving(), pod)
}

/// Of the kinds that can be held down (macvlan, VXLAN) none is moved, so that nothing restores it.
fn protodown() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    ensure!(
        scene.pod.ip("link set net1 protodown on").is_err(),
        "the kernel holds it down"
    );
    scene.del_returns(&scene.moving(), &before)
}

fn next_pod() -> Result<()> {
    let mut scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let fresh = state(&scene.pod)?;
    scene.in_pod(EVERYTHING)?;
    scene.del_returns(&scene.moving(), &before)?;
    // The namespace itself still has what the pod did to it: another pod, another namespace.
    scene.pod = scene.another_pod()?;
    answer_of(
        &scene.call_of(&scene.pod, "c2", "net1"),
        "ADD",
        &scene.moving(),
    )?
    .success()?;
    unchanged(&fresh, || state(&scene.pod), "in the next pod")?;
    answer_of(
        &scene.call_of(&scene.pod, "c2", "net1"),
        "DEL",
        &scene.moving(),
    )?
    .success()?;
    unchanged(&before, || scene.host_state(), "after the next pod")
}

fn namespace_died() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(EVERYTHING)?;
    // A name of the host would be in the way; the kernel drops such altnames.
    scene.in_pod(&["link property del dev mine\\xff altname nic0"])?;
    scene.pod_dies("mine\\xff")?;
    ensure!(
        scene.host.netns.ip("link show nic0").is_err(),
        "it has its name already"
    );
    answer_of(&scene.call(), "DEL", &scene.moving())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}
