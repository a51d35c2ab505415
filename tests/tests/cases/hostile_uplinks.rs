//! The netdev that the node is left through is no pod's, however the administrator wrote the routes.

use anyhow::{Context, Result};
use e2e::cases;
use e2e::scene::{DENIED, Scene, answer_of};
use serde_json::json;

cases! {
    one_default_route_is_an_uplink: Macvlan =>
        uplinks(&["route add default via 10.9.0.254"], &["nic0"], &["nic1"]);
    all_next_hops_of_a_default_route_are_uplinks: Macvlan => uplinks(
        &["route add default nexthop via 10.9.0.254 nexthop via 10.8.0.254"],
        &["nic0", "nic1"],
        &["nic2"],
    );
    all_members_of_a_nexthop_group_are_uplinks: Macvlan => uplinks(
        &[
            "sysctl ipv4/nexthop_compat_mode 0",
            "nexthop add id 1 via 10.9.0.254 dev nic0",
            "nexthop add id 2 via 10.8.0.254 dev nic1",
            "nexthop add id 9 group 1/2",
            "route add default nhid 9",
        ],
        &["nic0", "nic1"],
        &["nic2"],
    );
    halves_of_the_address_space_are_uplinks: Macvlan => uplinks(
        &["route add 0.0.0.0/1 via 10.9.0.254", "route add 128.0.0.0/1 via 10.8.0.254"],
        &["nic0", "nic1"],
        &["nic2"],
    );
    a_route_to_all_of_the_internet_is_an_uplink: Macvlan =>
        uplinks(&["-6 route add 2000::/3 via fd09::fe"], &["nic0"], &["nic1"]);
    default_routes_of_a_table_that_a_rule_names_are_uplinks: Macvlan => uplinks(
        &[
            "rule add pref 100 lookup 100",
            "route add default table 100 nexthop via 10.9.0.254 nexthop via 10.8.0.254",
        ],
        &["nic0", "nic1"],
        &["nic2"],
    );
    a_blackhole_for_one_network_hides_no_uplink: Macvlan => uplinks(
        &[
            "rule add pref 100 lookup 100",
            "route add blackhole 192.0.2.0/24 table 100",
            "route add default via 10.9.0.254 table 100",
        ],
        &["nic0"],
        &["nic1"],
    );
    default_routes_for_some_users_are_uplinks: Macvlan => uplinks(
        &["rule add uidrange 5000-6000 lookup 100", "route add default via 10.8.0.254 table 100"],
        &["nic1"],
        &["nic0"],
    );
    default_routes_for_a_protocol_are_uplinks: Macvlan => uplinks(
        &["rule add ipproto udp lookup 100", "route add default via 10.8.0.254 table 100"],
        &["nic1"],
        &["nic0"],
    );
    default_routes_of_rails_are_no_uplinks: Macvlan => uplinks(
        &[
            "rule add from 10.9.0.1 lookup 100",
            "rule add oif nic0 lookup 100",
            "rule add iif nic0 lookup 100",
            "route add default via 10.9.0.254 table 100",
        ],
        &[],
        &["nic0", "nic1"],
    );
    what_is_below_a_tunnel_that_is_the_way_out_is_an_uplink: Macvlan => uplinks(
        &[
            "link add out0 type vxlan id 66 dev nic0 dstport 4789",
            "link set out0 addrgenmode none up",
            "addr add 10.7.0.1/24 dev out0",
            "route add default via 10.7.0.254",
        ],
        &["nic0"],
        &["nic1"],
    );
    what_reaches_the_other_end_of_a_tunnel_is_an_uplink: Macvlan => uplinks(
        &[
            "link add out0 type vxlan id 66 remote 10.8.0.77 dstport 4789",
            "link set out0 addrgenmode none up",
            "addr add 10.7.0.1/24 dev out0",
            "route add default via 10.7.0.254",
        ],
        &["nic1"],
        &["nic0"],
    );
}

/// On a host with `nic0` to `nic2` and these settings no pod gets `withheld`, nor a child of it, and
/// all `given` carry a child.
fn uplinks(host: &[&str], withheld: &[&str], given: &[&str]) -> Result<()> {
    let scene = Scene::new()?;
    scene.host.add_nic("nic1", "peer1")?;
    scene.host.add_nic("nic2", "peer2")?;
    scene.on_host(&["addr add 10.8.0.1/24 dev nic1"])?;
    scene.on_host(host)?;
    for nic in withheld {
        for keys in [
            json!({"attach": "macvlan", "master": nic}),
            json!({"attach": "move", "device": nic}),
        ] {
            scene
                .refuses(&scene.network(&keys), &[DENIED], &[nic])
                .with_context(|| keys.to_string())?;
        }
    }
    for nic in given {
        let network = scene.network(&json!({"attach": "macvlan", "master": nic}));
        answer_of(&scene.call(), "ADD", &network)?
            .success()
            .with_context(|| format!("a child of {nic}"))?;
        answer_of(&scene.call(), "DEL", &network)?.success()?;
    }
    Ok(())
}
