//! Names, aliases and altnames are bytes: what is no UTF-8, or would steer a terminal, stops
//! nothing and reaches no log as it is.

use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::unchanged;
use e2e::scene::{Scene, answer_of, answer_to, mac_of, refusal};
use serde_json::json;

use super::hostile_ipam::plain;

cases! {
    a_name_on_the_host_that_is_no_utf8_stops_nothing: Macvlan =>
        beside(&["link add o\\xff\\xfe type veth peer name q\\xff"], &[]);
    an_alias_on_the_host_that_is_no_utf8_stops_nothing: Macvlan =>
        beside(&["link add other type veth peer name qother", "link set other alias \\xff\\xfe"], &[]);
    an_altname_on_the_host_that_is_no_utf8_stops_nothing: Macvlan => beside(
        &["link add other type veth peer name qother", "link property add dev other altname \\xc3\\x28"],
        &[],
    );
    an_alias_cut_inside_a_character_stops_nothing: Macvlan =>
        beside(&["link add other type veth peer name qother", "link set other alias grun\\xc3"], &[]);
    a_name_in_the_pod_that_is_no_utf8_stops_nothing: Macvlan =>
        beside(&[], &["link add o\\xff type veth peer name q\\xff"]);
    an_alias_in_the_pod_that_is_no_utf8_stops_nothing: Macvlan =>
        beside(&[], &["link add other type veth peer name qother", "link set other alias \\xff"]);
    an_altname_in_the_pod_that_is_no_utf8_stops_nothing: Macvlan => beside(
        &[],
        &["link add other type veth peer name qother", "link property add dev other altname \\xff"],
    );
    the_kind_of_a_qdisc_and_the_name_of_a_peer_in_odd_bytes_stop_nothing: Macvlan => beside(
        &["link set peer0 name p\\xffr0", "tc qdisc replace dev p\\xffr0 root handle 5: pfifo limit 9"],
        &[],
    );
    control_characters_in_names_of_the_host_stop_nothing: Macvlan => beside(
        &[
            "link add a\\x1b[31m type veth peer name b\\x07\\x01",
            "link set a\\x1b[31m alias one\\x0atwo\\x1b[2J",
            "link property add dev a\\x1b[31m altname x\\x1b]0;y\\x07",
        ],
        &[],
    );
    an_alias_of_the_nic_that_is_no_utf8_comes_back =>
        with(&["link set nic0 alias r\\xffil\\x1b\\x0a0"], &[]);
    an_altname_of_the_nic_that_is_no_utf8_comes_back =>
        with(&["link property add dev nic0 altname n\\xff\\x1b"], &[]);
    a_nic_whose_name_is_no_utf8_comes_back_or_is_refused => odd_nic();
    a_pod_that_renames_its_nic_to_bytes_loses_it => with(&[], &["link set net1 name m\\xff\\xfe"]);
    a_pod_that_renames_its_nic_to_escapes_loses_it => with(&[], &["link set net1 name m\\x1b[31m"]);
    a_pod_that_renames_its_nic_to_a_newline_loses_it => with(&[], &["link set net1 name m\\x01n"]);
    a_pod_that_sets_an_alias_of_bytes_loses_the_nic => with(&[], &["link set net1 alias \\xff\\xfe"]);
    a_pod_that_sets_an_altname_of_bytes_loses_the_nic =>
        with(&[], &["link property add dev net1 altname \\xff\\xfe"]);
    a_pod_that_sets_the_longest_alias_loses_the_nic => longest_alias();
    a_child_renamed_to_bytes_is_deleted: Macvlan => child_renamed();
    a_nic_back_from_a_dead_namespace_under_bytes_is_returned_by_del => dead(Way::Del);
    a_nic_back_from_a_dead_namespace_under_bytes_is_returned_by_reclaim => dead(Way::Reclaim);
    a_nic_back_from_a_dead_namespace_under_bytes_is_returned_by_the_next_add => dead(Way::Add);
    escapes_in_names_of_links_reach_no_log => logged();
    escapes_in_cni_variables_reach_no_log => variables();
    escapes_in_a_network_reach_no_log => network();
    bytes_in_cni_variables_are_an_error_and_no_panic => byte_variables();
    escapes_in_a_pods_name_do_not_reach_the_administrators_terminal: Macvlan => listed();
}

/// With these odd links about, every command does what it does without.
fn beside(host: &[&str], pod: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(host)?;
    scene.in_pod(pod)?;
    for network in [scene.child(), scene.moving()] {
        let before = scene.host_state()?;
        let call = scene.call();
        let result = answer_of(&call, "ADD", &network)?
            .success()
            .context("ADD")?;
        let mut with_result = network.clone();
        with_result["prevResult"] = result;
        answer_of(&call, "CHECK", &with_result)?
            .success()
            .context("CHECK")?;
        let mut all = network.clone();
        all["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "net1"}]);
        answer_of(&call, "GC", &all)?.success().context("GC")?;
        ensure!(
            scene.listed("pods")?.len() == 1,
            "the attachment is not listed"
        );
        let reclaimed = scene.tool("rdmactl", &["reclaim"])?;
        ensure!(reclaimed.status.success(), "reclaim: {}", reclaimed.stderr);
        ensure!(
            scene.pod.ip("link show net1").is_ok(),
            "net1 is not in the pod any more"
        );
        scene.del_returns(&network, &before)?;
        answer_of(&call, "STATUS", &network)?
            .success()
            .context("STATUS")?;
    }
    Ok(())
}

fn with(host: &[&str], pod: &[&str]) -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(host)?;
    scene.returns(&scene.moving(), pod)
}

fn odd_nic() -> Result<()> {
    let scene = Scene::furnished()?;
    let mac = mac_of(&scene.host.netns, "nic0")?;
    scene.on_host(&["link set nic0 name n\\xffc0"])?;
    let network = scene.network(&json!({"attach": "move", "hwaddr": mac}));
    // Programs that read sysfs by name have none for it.
    scene.returns_or_refuses(&network, &["netdev"])
}

fn longest_alias() -> Result<()> {
    let scene = Scene::furnished()?;
    let alias = "\\xff".repeat(255);
    scene.returns(&scene.moving(), &[&format!("link set net1 alias {alias}")])
}

fn child_renamed() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.child())?.success()?;
    scene.in_pod(&[
        "link set net1 down",
        "link set net1 name c\\xff",
        "link set c\\xff alias \\xff",
    ])?;
    scene.del_returns(&scene.child(), &before)?;
    let links = scene.pod.ip_json("link show")?;
    ensure!(
        links.as_array().map(Vec::len) == Some(1),
        "the child is left in the pod: {links}"
    );
    Ok(())
}

#[derive(Clone, Copy)]
enum Way {
    Del,
    Reclaim,
    Add,
}

fn dead(way: Way) -> Result<()> {
    let mut scene = Scene::furnished()?;
    let before = scene.host_state()?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    scene.in_pod(&[
        "link set net1 down",
        "link set net1 name m\\xff",
        "link set m\\xff alias \\xfe",
        "link property add dev m\\xff altname \\xfd",
    ])?;
    scene.pod_dies("m\\xff")?;
    let network = scene.moving();
    match way {
        Way::Del => drop(answer_of(&scene.call(), "DEL", &network)?.success()?),
        Way::Reclaim => {
            age(&scene)?;
            let answer = scene.tool("rdmactl", &["reclaim"])?;
            ensure!(answer.status.success(), "{}", answer.stderr);
        }
        Way::Add => {
            scene.pod = scene.another_pod()?;
            let call = scene.call_of(&scene.pod, "c2", "net1");
            answer_of(&call, "ADD", &network)?
                .success()
                .context("the next ADD")?;
            answer_of(&call, "DEL", &network)?.success()?;
        }
    }
    unchanged(&before, || scene.host_state(), "afterwards")
}

/// Lets every attachment be old enough to be reclaimed.
pub(crate) fn age(scene: &Scene) -> Result<()> {
    for entry in fs::read_dir(scene.host.state().join("attachments"))? {
        let path = entry?.path();
        let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
        record["created"] = json!(1);
        fs::write(&path, record.to_string())?;
    }
    Ok(())
}

/// Every line begins with a time, as RFC 3339 writes it, and has no control character.
pub(crate) fn well_formed(log: &str) -> Result<()> {
    plain("the log", log)?;
    for line in log.lines() {
        let stamp: Vec<char> = line.chars().take(20).collect();
        let digits = |range: std::ops::Range<usize>| {
            stamp
                .get(range)
                .is_some_and(|part| part.iter().all(char::is_ascii_digit))
        };
        let stamped = digits(0..4)
            && stamp.get(4) == Some(&'-')
            && digits(5..7)
            && stamp.get(7) == Some(&'-')
            && digits(8..10)
            && stamp.get(10) == Some(&'T')
            && digits(11..13)
            && stamp.get(13) == Some(&':')
            && digits(14..16)
            && stamp.get(16) == Some(&':')
            && digits(17..19);
        ensure!(stamped, "no RFC 3339 time at the start of {line:?}");
    }
    Ok(())
}

/// What the log at level `debug` has after ADD and DEL of both kinds; stderr is included.
fn log_of(scene: &Scene, calls: impl Fn(&Scene) -> Result<Vec<String>>) -> Result<String> {
    let log = scene.host.directory().join("cni.log");
    scene.policy(&json!({}), &json!({"log": {"file": log, "level": "debug"}}))?;
    for stderr in calls(scene)? {
        plain("stderr", &stderr)?;
    }
    let text = String::from_utf8_lossy(&fs::read(&log).context("the log")?).into_owned();
    well_formed(&text)?;
    // The same on stderr, where no file is named.
    scene.policy(&json!({}), &json!({"log": {"level": "debug"}}))?;
    for stderr in calls(scene)? {
        plain("stderr", &stderr)?;
    }
    Ok(text)
}

fn logged() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "link add a\\x1b[31m type veth peer name b\\x07",
        "link set nic0 alias one\\x0a2030-01-01T00:00:00Z\\x1b[2J\\xff",
        "link property add dev nic0 altname x\\x1b]0;y\\x07",
    ])?;
    let log = log_of(&scene, |scene| {
        let mut said = Vec::new();
        for network in [scene.child(), scene.moving()] {
            let added = answer_of(&scene.call(), "ADD", &network)?;
            added.success().context("ADD")?;
            said.push(added.stderr);
            scene.in_pod(&["link set net1 alias m\\x0a2030-01-01T00:00:00Z\\x1b[2J"])?;
            said.push(answer_of(&scene.call(), "DEL", &network)?.stderr);
        }
        // A refusal that names the link.
        scene.allow(&json!({"virtual": null}))?;
        let odd = scene.network(&json!({"attach": "move", "device": "a\u{1b}[31m"}));
        said.push(answer_of(&scene.call(), "ADD", &odd)?.stderr);
        Ok(said)
    })?;
    ensure!(!log.is_empty(), "level debug logs nothing");
    ensure!(
        !log.lines().any(|line| line.starts_with("2030")),
        "an alias passes for a line of ours"
    );
    Ok(())
}

fn variables() -> Result<()> {
    let scene = Scene::furnished()?;
    log_of(&scene, |scene| {
        let mut said = Vec::new();
        for (container, ifname, arguments) in [
            ("c1\u{1b}[31m", "net1", ""),
            ("c1\n2030-01-01T00:00:00Z forged", "net1", ""),
            ("c1", "n\u{1b}[31m", ""),
            (
                "c1",
                "net1",
                "IgnoreUnknown=1;K8S_POD_NAME=a\u{1b}[31m\n2030-01-01T00:00:00Z",
            ),
            (
                "c1",
                "net1",
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=\u{9b}31m;K8S_POD_NAME=b",
            ),
            ("c1", "net1", "\u{1b}[31m"),
        ] {
            let mut call = scene.call_of(&scene.pod, container, ifname);
            call.args = arguments.to_owned();
            for command in ["ADD", "DEL"] {
                said.push(answer_of(&call, command, &scene.child())?.stderr);
            }
        }
        Ok(said)
    })
    .map(drop)
}

fn network() -> Result<()> {
    let scene = Scene::furnished()?;
    log_of(&scene, |scene| {
        let mut said = Vec::new();
        for keys in [
            json!({"attach": "move", "device": "\u{1b}[31mnic\n2030-01-01T00:00:00Z"}),
            json!({"attach": "macvlan", "master": "\u{1b}[31m"}),
            json!({"attach": "\u{1b}[31m"}),
            json!({"name": "a\n2030-01-01T00:00:00Z\u{1b}[31m"}),
            json!({"cniVersion": "\u{1b}[31m"}),
            json!({"ipam": {"type": "\u{1b}[31m"}, "attach": "macvlan", "master": "nic0"}),
            json!({"atta\u{1b}[31mch": 1}),
            json!({"attach": "macvlan", "master": "nic0", "mode": "\u{1b}[31m"}),
            json!({"attach": "move", "deviceID": "\u{1b}[31m"}),
        ] {
            for command in ["ADD", "DEL"] {
                said.push(answer_of(&scene.call(), command, &scene.network(&keys))?.stderr);
            }
        }
        Ok(said)
    })
    .map(drop)
}

fn byte_variables() -> Result<()> {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let document = scene.child().to_string();
    for name in [
        "CNI_CONTAINERID",
        "CNI_IFNAME",
        "CNI_NETNS",
        "CNI_ARGS",
        "CNI_COMMAND",
    ] {
        let mut command = scene.call().command("ADD");
        command.env(name, OsStr::from_bytes(b"c\xff\xfe"));
        let answer = e2e::scene::bounded(&mut command, document.as_bytes())?;
        refusal(&answer, &[4, 8], &[]).context(name)?;
    }
    // The path may be any: it only must have the programs.
    let mut call = scene.call();
    call.path = OsStr::from_bytes(b"/\xff").to_owned();
    answer_to(&call, "ADD", document.as_bytes())?
        .success()
        .context("an odd CNI_PATH")?;
    answer_to(&call, "DEL", document.as_bytes())?.success()?;
    unchanged(&before, || scene.host_state(), "afterwards")
}

fn listed() -> Result<()> {
    let scene = Scene::furnished()?;
    let mut call = scene.call();
    call.args =
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=a\u{1b}[31m\nb\u{9b}31m".to_owned();
    let answer = answer_of(&call, "ADD", &scene.child())?;
    if !answer.status.success() {
        refusal(&answer, &[4], &[])?;
    }
    for (arguments, lines) in [
        // A note of the daemon, of the kubelet and of the GPUs.
        (&["pods"][..], 6),
        // The store, its pools and its leases.
        (&["addresses"], 7),
        (&["reclaim"], 2),
    ] {
        let shown = scene.tool("rdmactl", arguments)?;
        plain(arguments[0], &shown.stdout)?;
        plain(arguments[0], &shown.stderr)?;
        ensure!(
            shown.stdout.lines().count() <= lines,
            "one attachment, several lines: {}",
            shown.stdout
        );
    }
    answer_of(&call, "DEL", &scene.child())?;
    Ok(())
}
