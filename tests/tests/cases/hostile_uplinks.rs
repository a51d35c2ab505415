//! The netdev that the node is left through is no pod's, however the administrator wrote the routes.

use std::fs;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::cni::answer;
use e2e::scene::{DENIED, Scene, answer_of};
use serde_json::{Value, json};

use super::cni_faults::traced;

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
    a_default_route_for_a_source_alone_is_an_uplink: Macvlan => uplinks(
        &["-6 route add default from fd09::/64 via fd09::fe"],
        &["nic0"],
        &["nic1"],
    );
    default_routes_of_one_metric_are_all_uplinks: Macvlan => uplinks(
        &["route add default via 10.9.0.254", "route append default via 10.8.0.254"],
        &["nic0", "nic1"],
        &["nic2"],
    );
    a_rule_for_the_nodes_own_packets_names_a_table_of_uplinks: Macvlan => uplinks(
        &["rule add iif lo lookup 100", "route add default via 10.9.0.254 table 100"],
        &["nic0"],
        &["nic1"],
    );
    the_lower_half_of_the_address_space_is_an_uplink: Macvlan => uplinks(
        &["route add 0.0.0.0/1 via 10.9.0.254", "route add 128.0.0.0/1 via 10.9.0.254"],
        &["nic0"],
        &["nic1"],
    );
    halves_in_two_tables_are_uplinks: Macvlan => uplinks(
        &[
            "rule add pref 100 lookup 100",
            "route add 0.0.0.0/1 via 10.9.0.254 table 100",
            "route add 0.0.0.0/1 via 10.8.0.254",
        ],
        &["nic0", "nic1"],
        &["nic2"],
    );
    tables_of_rules_for_halves_have_uplinks: Macvlan => uplinks(
        &[
            "rule add to 0.0.0.0/1 lookup 110",
            "rule add to 128.0.0.0/1 lookup 111",
            "route add default via 10.9.0.254 table 110",
            "route add default via 10.8.0.254 table 111",
        ],
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
    a_netdev_whose_peer_has_the_nodes_address_is_not_an_uplink: Macvlan => uplinks_of(
        &["10.9.0.1"],
        &["addr add 10.7.0.1 peer 10.9.0.1/32 dev nic1"],
        &["nic0"],
        &["nic1"],
    );
    a_default_route_of_a_higher_metric_is_no_uplink: Macvlan => uplinks(
        &["route add default via 10.9.0.254 metric 100", "route add default via 10.8.0.254 metric 200"],
        &["nic0"],
        &["nic1"],
    );
    a_route_to_a_documentation_network_is_no_uplink: Macvlan => uplinks(
        &["route add default via 10.9.0.254", "route add 192.0.2.0/24 via 10.8.0.254"],
        &["nic0"],
        &["nic1"],
    );
    advertised_default_routes_beside_the_nodes_are_no_uplinks: Macvlan => uplinks(
        &[
            "route add default via 10.9.0.254",
            "-6 route add default via fe80::1 dev nic1 proto ra",
            "-6 route add default via fe80::2 dev nic2 proto ra metric 2048",
        ],
        &["nic0"],
        &["nic1", "nic2"],
    );
    advertised_default_routes_alone_are_uplinks: Macvlan => uplinks(
        &["-6 route add default via fe80::1 dev nic1 proto ra"],
        &["nic1"],
        &["nic0", "nic2"],
    );
    a_default_route_of_a_family_without_node_address_is_no_uplink: Macvlan => uplinks_of(
        &["10.9.0.1"],
        &["-6 route add default via fe80::1 dev nic1"],
        &["nic0"],
        &["nic1"],
    );
    an_advertised_route_beside_the_nodes_address_is_no_uplink: Macvlan => uplinks_of(
        &["fd09::1"],
        &["-6 route add default via fe80::1 dev nic1 proto ra"],
        &["nic0"],
        &["nic1"],
    );
    a_default_route_behind_halves_of_the_address_space_is_an_uplink: Macvlan => uplinks(
        &[
            "route add default via 10.9.0.254",
            "route add 0.0.0.0/1 via 10.8.0.254",
            "route add 128.0.0.0/1 via 10.8.0.254",
        ],
        &["nic0", "nic1"],
        &["nic2"],
    );
    a_default_route_below_a_marked_tunnel_is_an_uplink: Macvlan => uplinks(
        &[
            "route add default via 10.9.0.254",
            "route add default via 10.8.0.254 table 51820",
            "rule add pref 101 not fwmark 51820 lookup 51820",
            "rule add pref 100 lookup main suppress_prefixlength 0",
        ],
        &["nic0", "nic1"],
        &["nic2"],
    );
    a_refusing_half_of_the_address_space_hides_no_uplink: Macvlan => uplinks(
        &[
            "route add default via 10.9.0.254",
            "route add unreachable 0.0.0.0/1",
            "route add blackhole 128.0.0.0/1",
            "-6 route add default via fd09::fe",
            "-6 route add unreachable ::/1",
        ],
        &["nic0"],
        &["nic1"],
    );
    networks_of_all_that_is_asked_about_hide_no_uplink: Macvlan => uplinks(
        &[
            "route add default via 10.9.0.254",
            "route add 54.0.0.0/7 via 10.8.0.254",
            "route add 62.0.0.0/7 via 10.8.0.254",
        ],
        &["nic0"],
        &["nic1"],
    );
    a_rule_that_refuses_hides_no_uplink: Macvlan => uplinks(
        &["route add default via 10.9.0.254", "rule add pref 100 to 128.0.0.0/1 unreachable"],
        &["nic0"],
        &["nic1"],
    );
    default_routes_before_many_others_are_uplinks: Macvlan =>
        among_many(&["default via 10.9.0.254", "default via 10.8.0.254"]);
    an_add_does_not_read_all_routes: Macvlan, Strace => not_all_read(&["route add default via 10.9.0.254"]);
    an_add_without_a_default_route_does_not_read_all_routes: Macvlan, Strace => not_all_read(&[]);
    an_add_behind_halves_of_the_address_space_does_not_read_all_routes: Macvlan, Strace =>
        not_all_read(&["route add 0.0.0.0/1 via 10.9.0.254", "route add 128.0.0.0/1 via 10.9.0.254"]);
    the_peer_of_a_node_is_no_uplink: Macvlan => uplinks_of(
        &["10.9.0.99"],
        &["addr add 10.7.0.1 peer 10.9.0.99 dev nic1"],
        &[],
        &["nic1"],
    );
    a_denied_uplink_names_the_narrow_remedy => remedy();
    routes_that_an_agent_writes_as_advertised_return => agents_routes();
}

/// On a host with `nic0` to `nic2` and these settings no pod gets `withheld`, nor a child of it, and
/// all `given` carry a child. The daemon says the same of them.
fn uplinks(host: &[&str], withheld: &[&str], given: &[&str]) -> Result<()> {
    uplinks_of(&[], host, withheld, given)
}

/// The same on a node that its cluster knows by these addresses.
fn uplinks_of(
    node_addresses: &[&str],
    host: &[&str],
    withheld: &[&str],
    given: &[&str],
) -> Result<()> {
    let scene = Scene::with_nics(3)?;
    scene.hide_processes()?;
    // Each program sees itself as the first process, in the host's network namespace.
    symlink("/proc/self", scene.host_root().join("proc/1"))?;
    scene.on_host(&["addr add 10.8.0.1/24 dev nic1"])?;
    scene.on_host(host)?;
    fs::create_dir_all(scene.host.state())?;
    fs::write(
        scene.host.state().join("node-addresses"),
        node_addresses.join("\n"),
    )?;
    let excluded = excluded(&scene, node_addresses)?;
    for nic in withheld {
        ensure!(
            excluded
                .iter()
                .any(|reason| reason.contains(&format!("needs {nic}: "))),
            "{nic} is offered: {excluded:?}"
        );
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
        ensure!(
            !excluded
                .iter()
                .any(|reason| reason.contains(&format!("needs {nic}: "))),
            "{nic} is not offered: {excluded:?}"
        );
        let network = scene.network(&json!({"attach": "macvlan", "master": nic}));
        answer_of(&scene.call(), "ADD", &network)?
            .success()
            .with_context(|| format!("a child of {nic}"))?;
        answer_of(&scene.call(), "DEL", &network)?.success()?;
    }
    Ok(())
}

/// The kernel's list of routes has many parts; the default routes are in the first.
fn among_many(defaults: &[&str]) -> Result<()> {
    let others = (0..300).map(|n| format!("20.{}.{}.0/24 via 10.9.0.254", n / 250, n % 250));
    let all = others.chain(defaults.iter().map(ToString::to_string));
    let host: Vec<String> = all.map(|route| format!("route append {route}")).collect();
    let host: Vec<&str> = host.iter().map(String::as_str).collect();
    uplinks(&host, &["nic0", "nic1"], &["nic2"])
}

fn not_all_read(host: &[&str]) -> Result<()> {
    let scene = Scene::with_nics(2)?;
    scene.on_host(host)?;
    let network = scene.network(&json!({"attach": "macvlan", "master": "nic1"}));
    let log = scene.host.directory().join("trace");
    let options = ["-qq", "-e", "trace=recvfrom", "-o"].map(str::to_owned);
    let options: Vec<String> = options
        .into_iter()
        .chain([log.display().to_string()])
        .collect();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let received = || -> Result<usize> {
        let call = scene.call();
        answer(
            &mut traced(&call, "ADD", &options),
            network.to_string().as_bytes(),
        )?
        .success()?;
        answer_of(&call, "DEL", &network)?.success()?;
        Ok(fs::read_to_string(&log)?.lines().count())
    };
    received()?;
    let few = received()?;
    let batch = scene.host.directory().join("routes");
    let routes =
        (0..20_000).map(|n| format!("route add 20.{}.{}.0/24 via 10.9.0.254\n", n >> 8, n & 255));
    fs::write(&batch, routes.collect::<String>())?;
    scene
        .host
        .netns
        .ip(&format!("-batch {}", batch.display()))?;
    let many = received()?;
    ensure!(
        few > 10 && many <= few,
        "{many} answers of the kernel, {few} with one route"
    );
    Ok(())
}

/// Why the daemon leaves HCAs out of an exclusive pool of all.
fn excluded(scene: &Scene, node_addresses: &[&str]) -> Result<Vec<String>> {
    let config = scene.host.directory().join("pools.yaml");
    let pool = "version: 1\npools:\n- { resource: rdma/a, mode: exclusive, select: { rdmaDevices: [\"*\"] } }\n";
    fs::write(&config, pool)?;
    let (config, root) = (
        config.display().to_string(),
        scene.host_root().display().to_string(),
    );
    let addresses = node_addresses.join(",");
    let mut arguments = vec!["validate", "--on-host", "--json", "--host-root", &root];
    if !node_addresses.is_empty() {
        arguments.extend(["--node-addresses", &addresses]);
    }
    arguments.push(&config);
    let answer = scene.tool("rdmactl", &arguments)?;
    let document: Value = serde_json::from_str(&answer.stdout).context(answer.stderr)?;
    let reasons = document["files"][0]["excluded"]
        .as_array()
        .context("no list of what is excluded")?;
    Ok(reasons.iter().map(ToString::to_string).collect())
}

fn remedy() -> Result<()> {
    let scene = Scene::new()?;
    scene.on_host(&["route add default via 10.9.0.254"])?;
    scene.refuses(
        &scene.moving(),
        &[DENIED],
        &["nic0", "default route", "allow.uplinks", "allow.netdevs"],
    )?;
    // Both keys together open this netdev alone.
    let selectors = json!([{"ifNames": ["nic1"]}]);
    scene.allow(&json!({"uplinks": true, "netdevs": selectors}))?;
    scene.refuses(&scene.moving(), &[DENIED], &["nic0", "allow.netdevs"])?;
    scene.allow(&json!({"uplinks": true, "netdevs": [{"ifNames": ["nic0"]}]}))?;
    scene.returns(&scene.moving(), &[])
}

/// With an end they are the kernel's, which learns them anew.
fn agents_routes() -> Result<()> {
    let scene = Scene::new()?;
    scene.host.add_nic("nic1", "peer1")?;
    scene.on_host(&[
        "addr add 10.8.0.1/24 dev nic1",
        "route add default via 10.8.0.254",
        "-6 route add default via fd09::fe dev nic0 proto ra metric 90",
        "-6 route add fd88::/32 via fd09::fe dev nic0 proto ra",
    ])?;
    let before = scene.host_state()?;
    let network = scene.moving();
    answer_of(&scene.call(), "ADD", &network)?.success()?;
    let routes = scene.pod.ip("-6 route show dev net1")?;
    ensure!(routes.contains("fd88::/32"), "not in the pod:\n{routes}");
    scene.del_returns(&network, &before)
}
