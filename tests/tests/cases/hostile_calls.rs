//! Calls that no sane runtime makes: odd namespaces, names, documents and results of others.
//! Each ends in bounded time, with one error document and nothing changed.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::{state, unchanged};
use e2e::scene::{INVALID_NETWORK, Scene, answer_of, answer_to, refusal};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

cases! {
    the_hosts_own_namespace_is_refused: Macvlan => netns(|scene| Ok(scene.host.netns.path().into()));
    a_link_to_the_hosts_own_namespace_is_refused: Macvlan => netns(|scene| {
        let path = scene.host.directory().join("link");
        symlink(scene.host.netns.path(), &path)?;
        Ok(path)
    });
    the_callers_own_namespace_by_proc_is_refused: Macvlan => netns(|_| Ok("/proc/self/ns/net".into()));
    the_callers_thread_namespace_by_proc_is_refused: Macvlan => netns(|_| Ok("/proc/thread-self/ns/net".into()));
    a_mount_namespace_is_refused: Macvlan => netns(|_| Ok("/proc/self/ns/mnt".into()));
    a_user_namespace_is_refused: Macvlan => netns(|_| Ok("/proc/self/ns/user".into()));
    a_pid_namespace_is_refused: Macvlan => netns(|_| Ok("/proc/self/ns/pid".into()));
    a_fifo_as_namespace_does_not_hang: Macvlan => netns(|scene| {
        let path = scene.host.directory().join("fifo");
        mkfifo(&path, Mode::S_IRWXU)?;
        Ok(path)
    });
    a_socket_as_namespace_is_refused: Macvlan => netns(|scene| {
        let path = scene.host.directory().join("socket");
        drop(UnixListener::bind(&path)?);
        Ok(path)
    });
    a_file_as_namespace_is_refused: Macvlan => netns(|scene| Ok(scene.policy_file()));
    a_directory_as_namespace_is_refused: Macvlan => netns(|scene| Ok(scene.host.directory().into()));
    a_device_as_namespace_is_refused: Macvlan => netns(|_| Ok("/dev/zero".into()));
    a_terminal_as_namespace_does_not_hang: Macvlan => netns(|_| Ok("/dev/ptmx".into()));
    a_missing_namespace_is_refused: Macvlan => netns(|_| Ok("/run/netns/none".into()));
    a_namespace_of_5000_bytes_is_refused: Macvlan => netns(|_| Ok(format!("/{}", "n".repeat(5000)).into()));
    a_namespace_of_300_directories_is_refused: Macvlan => netns(|_| Ok("/x".repeat(300).into()));
    a_relative_namespace_is_refused: Macvlan => netns(|_| Ok("../x".into()));
    a_link_to_itself_as_namespace_is_refused: Macvlan => netns(|scene| {
        let path = scene.host.directory().join("loop");
        symlink(&path, &path)?;
        Ok(path)
    });
    del_with_the_hosts_namespace_leaves_the_hosts_links => del_on_host();
    a_container_id_with_a_slash_is_refused: Macvlan => container("a/b", false);
    a_container_id_that_climbs_is_refused: Macvlan => container("../../../../tmp/x", false);
    a_container_id_of_dots_is_refused: Macvlan => container("..", false);
    a_container_id_with_a_percent_nul_reaches_nothing: Macvlan => container("a%00b", false);
    a_container_id_with_a_separator_of_ours_is_refused: Macvlan => container("a@b@c", false);
    a_container_id_with_a_newline_is_refused: Macvlan => container("a\nb", false);
    a_container_id_of_300_bytes_is_refused_or_served: Macvlan => container(&"c".repeat(300), true);
    a_container_id_of_5000_bytes_is_refused_or_served: Macvlan => container(&"c".repeat(5000), true);
    a_container_id_with_letters_beyond_ascii_is_refused: Macvlan => container("cé", false);
    container_ids_that_differ_in_case_are_two: Macvlan => case_of_ids();
    an_interface_name_with_a_slash_is_refused => interface("a/b");
    an_interface_name_that_climbs_is_refused => interface("../x");
    an_interface_name_of_dots_is_refused => interface("..");
    an_interface_name_of_one_dot_is_refused => interface(".");
    an_interface_name_with_a_format_is_refused => interface("net%d");
    an_interface_name_with_a_colon_is_refused => interface("net1:0");
    an_interface_name_with_a_space_is_refused => interface("net 1");
    an_interface_name_called_all_or_default_is_refused_or_served: Macvlan => sysctl_names();
    an_index_out_of_range_in_a_previous_result_is_refused: Macvlan =>
        previous(json!({"ips": [{"address": "10.9.0.7/24", "interface": 7}]}));
    a_negative_index_in_a_previous_result_is_refused: Macvlan =>
        previous(json!({"ips": [{"address": "10.9.0.7/24", "interface": -1}]}));
    a_huge_index_in_a_previous_result_is_refused: Macvlan =>
        previous(json!({"ips": [{"address": "10.9.0.7/24", "interface": 4_294_967_296_u64}]}));
    an_index_with_a_fraction_in_a_previous_result_is_refused: Macvlan =>
        previous(json!({"ips": [{"address": "10.9.0.7/24", "interface": 0.5}]}));
    an_address_without_length_in_a_previous_result_is_refused: Macvlan =>
        previous(json!({"ips": [{"address": "10.9.0.7"}]}));
    a_previous_result_that_is_text_is_refused: Macvlan => previous(json!("x"));
    a_previous_result_that_is_a_list_is_refused: Macvlan => previous(json!([]));
    interfaces_that_are_no_list_in_a_previous_result_are_refused: Macvlan => previous(json!({"interfaces": {}}));
    a_previous_result_of_an_unknown_version_is_refused: Macvlan => previous(json!({"cniVersion": "9.9.9"}));
    a_previous_result_of_20000_interfaces_ends_in_bounded_time: Macvlan => huge_previous();
    a_previous_result_that_names_a_host_link_reaches_nothing => names_host_link();
    an_empty_document_is_refused => document(b"");
    a_document_of_blanks_is_refused => document(b" \n\t ");
    a_null_document_is_refused => document(b"null");
    a_list_for_a_document_is_refused => document(b"[]");
    ten_mebibytes_of_blanks_are_refused => document(&[b' '; 10 << 20]);
    ten_mebibytes_of_text_are_refused => huge_value();
    deep_nesting_is_refused => document("[".repeat(1_000_000).as_bytes());
    deep_nesting_of_objects_is_refused => document("{\"a\":".repeat(200_000).as_bytes());
    deep_nesting_below_a_key_stops_all_but_del => nested_key();
    a_key_twice_is_refused => twice();
    bytes_that_are_no_utf8_are_refused => invalid_utf8();
    half_a_surrogate_is_refused => named(r#""rail\ud800""#);
    a_nul_in_the_networks_name_is_refused => named(r#""rail\u0000""#);
    a_network_name_that_climbs_is_refused => named(r#""../../etc""#);
    a_network_name_with_a_newline_is_refused => named(r#""rail\n0""#);
    a_network_name_of_5000_bytes_is_refused_or_served: Macvlan => long_network();
    a_network_name_that_is_a_number_is_refused => named("7");
    a_byte_order_mark_is_refused => document("\u{feff}{}".as_bytes());
    nul_bytes_are_refused => document(&[0; 64]);
    text_behind_the_document_is_refused => behind();
    a_number_beyond_all_stops_all_but_del => value(br#"{"cniVersion":"1.0.0","name":"a","mtu":1e999}"#);
    a_version_that_is_no_version_is_refused => version();
    a_command_in_lower_case_is_refused => command("add");
    an_empty_command_does_nothing => empty_command();
    a_command_of_5000_bytes_is_refused => command(&"ADD".repeat(1700));
    a_path_of_nothing_is_refused_or_needless: Macvlan => path();
}

fn unharmed(scene: &Scene, before: &e2e::host_state::State, when: &str) -> Result<()> {
    unchanged(before, || scene.host_state(), when)
}

fn netns(path: impl Fn(&Scene) -> Result<PathBuf>) -> Result<()> {
    let scene = Scene::furnished()?;
    let mut call = scene.call();
    call.netns = path(&scene)?;
    let before = scene.host_state()?;
    for network in [scene.child(), scene.moving()] {
        for command in ["ADD", "CHECK"] {
            let mut document = network.clone();
            if command == "CHECK" {
                document["prevResult"] = json!({"cniVersion": "1.1.0", "interfaces": [{"name": "net1", "sandbox": call.netns}]});
            }
            refusal(&answer_of(&call, command, &document)?, &[], &[]).context(command)?;
        }
        unharmed(&scene, &before, "ADD and CHECK")?;
        answer_of(&call, "DEL", &network)?
            .success()
            .context("DEL")?;
        unharmed(&scene, &before, "DEL")?;
    }
    Ok(())
}

/// DEL for names of host links, with the host's namespace as the pod's.
fn del_on_host() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    for path in [scene.host.netns.path(), Path::new("/proc/self/ns/net")] {
        for ifname in ["nic0", "peer0", "lo"] {
            let mut call = scene.call_of(&scene.pod, "c1", ifname);
            call.netns = path.into();
            for network in [scene.child(), scene.moving(), scene.network(&json!({}))] {
                answer_of(&call, "DEL", &network)?.success()?;
                let mut all = network.clone();
                all["cni.dev/valid-attachments"] = json!([]);
                answer_of(&call, "GC", &all)?.success()?;
            }
            unharmed(&scene, &before, ifname)?;
        }
    }
    Ok(())
}

/// Refused as a variable, or, if that is allowed, served and ended without a trace.
fn container(id: &str, may_be_served: bool) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    for network in [scene.child(), scene.moving()] {
        let call = scene.call_of(&scene.pod, id, "net1");
        let answer = answer_of(&call, "ADD", &network)?;
        if !answer.status.success() || !may_be_served {
            refusal(&answer, if may_be_served { &[] } else { &[4] }, &[])?;
            ensure!(
                scene.pod.ip("link show net1").is_err(),
                "a refused ADD left its interface"
            );
            answer_of(&call, "DEL", &network)?;
        } else {
            answer_of(&call, "DEL", &network)?.success()?;
        }
        unharmed(&scene, &before, "after DEL")?;
    }
    Ok(())
}

fn case_of_ids() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let other = scene.another_pod()?;
    let calls = [
        scene.call_of(&scene.pod, "abc", "net1"),
        scene.call_of(&other, "ABC", "net1"),
    ];
    for call in &calls {
        answer_of(call, "ADD", &scene.child())?.success()?;
    }
    answer_of(&calls[0], "DEL", &scene.child())?.success()?;
    ensure!(
        other.ip("link show net1").is_ok(),
        "the other's interface is gone"
    );
    ensure!(
        scene.listed("addresses")?.len() == 1,
        "the other's lease is gone"
    );
    answer_of(&calls[1], "DEL", &scene.child())?.success()?;
    unharmed(&scene, &before, "after both")
}

fn interface(name: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let call = scene.call_of(&scene.pod, "c1", name);
    for network in [scene.child(), scene.moving()] {
        refusal(&answer_of(&call, "ADD", &network)?, &[4], &["CNI_IFNAME"])?;
        unharmed(&scene, &before, "after ADD")?;
        answer_of(&call, "DEL", &network)?;
        unharmed(&scene, &before, "after DEL")?;
    }
    Ok(())
}

/// Names that below `/proc/sys/net` mean every interface.
fn sysctl_names() -> Result<()> {
    let scene = Scene::furnished()?;
    let mut pods = state(&scene.pod)?;
    pods.retain(|key, _| key.contains("conf/all/") || key.contains("conf/default/"));
    for name in ["all", "default"] {
        let before = scene.host_state()?;
        let call = scene.call_of(&scene.pod, "c1", name);
        let answer = answer_of(&call, "ADD", &scene.child())?;
        if !answer.status.success() {
            refusal(&answer, &[], &[])?;
        }
        answer_of(&call, "DEL", &scene.child())?;
        unharmed(&scene, &before, name)?;
        let mut now = state(&scene.pod)?;
        now.retain(|key, _| key.contains("conf/all/") || key.contains("conf/default/"));
        e2e::cni_host::same(&pods, &now, "settings of every interface of the pod")?;
    }
    Ok(())
}

fn previous(result: Value) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let mut whole = result.clone();
    if let Some(whole) = whole.as_object_mut() {
        whole.entry("cniVersion").or_insert("1.1.0".into());
        whole
            .entry("interfaces")
            .or_insert(json!([{"name": "eth0", "sandbox": scene.pod.path()}]));
    }
    for base in [
        json!({"attach": "macvlan", "master": "nic0"}),
        json!({"attach": "move", "device": "nic0"}),
        json!({"attach": "rdma-only", "rdmaDevice": "mlx5_0"}),
    ] {
        let mut keys = base.clone();
        keys["prevResult"] = whole.clone();
        let network = scene.network(&keys);
        for command in ["ADD", "CHECK"] {
            let answer = answer_of(&scene.call(), command, &network)?;
            refusal(&answer, &[], &[]).with_context(|| format!("{command} with {base}"))?;
        }
        unharmed(&scene, &before, "ADD and CHECK")?;
        answer_of(&scene.call(), "DEL", &network)?
            .success()
            .with_context(|| format!("DEL with {base}"))?;
        unharmed(&scene, &before, "DEL")?;
    }
    Ok(())
}

fn huge_previous() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let interfaces: Vec<Value> = (0..20_000)
        .map(|n| json!({"name": format!("eth{n}"), "sandbox": "/x"}))
        .collect();
    let ips: Vec<Value> = (0..20_000)
        .map(|n| json!({"address": "10.9.0.7/24", "interface": n}))
        .collect();
    let mut network = scene.child();
    network["prevResult"] = json!({"cniVersion": "1.1.0", "interfaces": interfaces, "ips": ips});
    for command in ["ADD", "CHECK"] {
        let answer = answer_of(&scene.call(), command, &network)?;
        if !answer.status.success() {
            refusal(&answer, &[], &[])?;
        }
    }
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    unharmed(&scene, &before, "after DEL")
}

/// A chained call whose prevResult names an interface of the host.
fn names_host_link() -> Result<()> {
    let scene = Scene::with_hardware()?;
    let before = scene.host_state()?;
    for sandbox in [
        json!(null),
        json!(""),
        json!(scene.host.netns.path()),
        json!("/proc/self/ns/net"),
    ] {
        for attach in ["rdma-only", "ipvlan"] {
            let mut network = scene.network(
                &json!({"attach": attach, "prevResult": {"cniVersion": "1.1.0",
                "interfaces": [{"name": "peer0"}, {"name": "net1"}]}}),
            );
            if !sandbox.is_null() {
                network["prevResult"]["interfaces"][0]["sandbox"] = sandbox.clone();
                network["prevResult"]["interfaces"][1]["sandbox"] = sandbox.clone();
            }
            let answer = answer_of(&scene.call(), "ADD", &network)?;
            if !answer.status.success() {
                refusal(&answer, &[], &[])?;
            }
            answer_of(&scene.call(), "DEL", &network)?.success()?;
            unharmed(&scene, &before, &format!("{attach} in {sandbox}"))?;
        }
    }
    Ok(())
}

/// Every command refuses this document.
fn document(bytes: &[u8]) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    refused_document(&scene, bytes)?;
    unharmed(&scene, &before, "afterwards")
}

/// A value that cannot be read is no reason to keep what was attached.
fn value(bytes: &[u8]) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    refused_by(&scene, &["ADD", "CHECK", "GC", "STATUS"], bytes)?;
    answer_to(&scene.call(), "DEL", bytes)?.success()?;
    unharmed(&scene, &before, "afterwards")
}

fn refused_document(scene: &Scene, bytes: &[u8]) -> Result<()> {
    refused_by(scene, &["ADD", "DEL", "CHECK", "GC", "STATUS"], bytes)
}

fn refused_by(scene: &Scene, commands: &[&str], bytes: &[u8]) -> Result<()> {
    for command in commands {
        let answer = answer_to(&scene.call(), command, bytes)?;
        refusal(&answer, &[1, 6, 7, 50], &[]).context((*command).to_owned())?;
        let said = answer.stdout.len() + answer.stderr.len();
        ensure!(
            said < 16 * 1024,
            "{command}: {said} bytes about a document that says nothing"
        );
    }
    Ok(())
}

fn huge_value() -> Result<()> {
    let scene = Scene::furnished()?;
    let mut network = scene.child();
    network["example.com/pad"] = "x".repeat(10 << 20).into();
    let before = scene.host_state()?;
    refusal(
        &answer_of(&scene.call(), "ADD", &network)?,
        &[INVALID_NETWORK],
        &["1048576 bytes"],
    )?;
    // The runtime's DEL after it finds nothing to do.
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    unharmed(&scene, &before, "afterwards")
}

fn nested_key() -> Result<()> {
    let nested = "[".repeat(50_000) + &"]".repeat(50_000);
    value(format!(r#"{{"cniVersion":"1.0.0","name":"rail0","type":"rdma-netdev","attach":"move","device":"nic0","args":{nested}}}"#).as_bytes())
}

fn twice() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    for keys in [
        r#""attach":"macvlan","attach":"move","master":"nic0","device":"nic0""#,
        r#""attach":"macvlan","master":"peer0","master":"nic0""#,
        r#""name":"rail1","attach":"macvlan","master":"nic0""#,
    ] {
        let text =
            format!(r#"{{"cniVersion":"1.1.0","name":"rail0","type":"rdma-netdev",{keys}}}"#);
        refusal(
            &answer_to(&scene.call(), "ADD", text.as_bytes())?,
            &[6, 7],
            &[],
        )
        .with_context(|| text.clone())?;
        unharmed(&scene, &before, &text)?;
    }
    Ok(())
}

fn invalid_utf8() -> Result<()> {
    let scene = Scene::furnished()?;
    let mut bytes = scene.child().to_string().into_bytes();
    let at = bytes
        .windows(4)
        .position(|four| four == b"nic0")
        .context("no nic0")?;
    bytes[at] = 0xff;
    document(&bytes)?;
    document(&[0xff, 0xfe, b'{', b'}'])
}

fn named(name: &str) -> Result<()> {
    document(format!(r#"{{"cniVersion":"1.1.0","name":{name},"type":"rdma-netdev","attach":"move","device":"nic0"}}"#).as_bytes())
}

fn long_network() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    for length in [255, 300, 5000] {
        for base in [scene.child(), scene.moving()] {
            let mut network = base.clone();
            network["name"] = "n".repeat(length).into();
            let answer = answer_of(&scene.call(), "ADD", &network)?;
            if !answer.status.success() {
                refusal(&answer, &[], &[])?;
                ensure!(
                    scene.pod.ip("link show net1").is_err(),
                    "a refused ADD left its interface"
                );
                answer_of(&scene.call(), "DEL", &network)?;
            } else {
                answer_of(&scene.call(), "DEL", &network)?.success()?;
            }
            unharmed(&scene, &before, "after DEL")?;
        }
    }
    Ok(())
}

fn behind() -> Result<()> {
    let scene = Scene::furnished()?;
    let text = scene.moving().to_string();
    document(format!("{text}{text}").as_bytes())?;
    document(format!("{text} x").as_bytes())?;
    document(format!("{text}\0").as_bytes())
}

fn version() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    for version in [
        "9.9.9",
        "1.1.0.0",
        "v1.0.0",
        "1.0.0\\n",
        "1.0",
        "-1.0.0",
        "1.0.0-beta",
    ] {
        refused_document(&scene, format!(r#"{{"cniVersion":"{version}","name":"rail0","type":"rdma-netdev","attach":"move","device":"nic0"}}"#).as_bytes())
            .with_context(|| version.to_owned())?;
    }
    unharmed(&scene, &before, "afterwards")
}

fn command(command: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let answer = answer_of(&scene.call(), command, &scene.moving())?;
    refusal(&answer, &[4], &["CNI_COMMAND"])?;
    ensure!(
        answer.stdout.len() < 4096,
        "{} bytes about a command",
        answer.stdout.len()
    );
    unharmed(&scene, &before, "afterwards")
}

/// As none at all: a person who typed the program's name.
fn empty_command() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let answer = answer_of(&scene.call(), "", &scene.moving())?;
    if answer.status.success() {
        ensure!(
            answer.stdout.is_empty(),
            "a result of nothing: {}",
            answer.stdout
        );
    } else {
        refusal(&answer, &[4], &["CNI_COMMAND"])?;
    }
    unharmed(&scene, &before, "afterwards")
}

fn path() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let file = scene.host.directory().join("file");
    drop(File::create(&file)?);
    fs::create_dir(scene.host.directory().join("empty"))?;
    for path in [
        "/nonexistent",
        ":",
        "::::",
        "relative",
        &file.to_string_lossy(),
        "/dev/zero",
        &"/x:".repeat(2000),
    ] {
        let mut call = scene.call();
        call.path = path.into();
        let static_addresses = scene.network(&json!({"attach": "macvlan", "master": "nic0",
            "ipam": {"type": "static", "addresses": [{"address": "10.9.0.7/24"}]}}));
        refusal(
            &answer_of(&call, "ADD", &static_addresses)?,
            &[],
            &["static"],
        )
        .with_context(|| path.to_owned())?;
        answer_of(&call, "DEL", &static_addresses)?.success()?;
        unharmed(&scene, &before, path)?;
    }
    Ok(())
}
