//! `ipam.type` written by a tenant: only programs that the node's policy lists are executed, and
//! what those answer is bounded.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::cases;
use e2e::cni::Call;
use e2e::host_state::unchanged;
use e2e::scene::{DENIED, INVALID_NETWORK, Scene, UNSUPPORTED, answer_of, refusal};
use serde_json::{Value, json};

cases! {
    host_device_is_not_executed_as_ipam => not_executed("host-device", &json!({"device": "nic0"}));
    rdma_netdev_is_not_executed_as_ipam => not_executed("rdma-netdev", &json!({}));
    host_local_with_a_directory_elsewhere_is_not_executed =>
        not_executed("host-local", &json!({"dataDir": "/etc/cni", "subnet": "10.9.0.0/24"}));
    dhcp_is_not_executed_though_the_policy_lists_it => dhcp();
    whereabouts_with_a_log_file_is_not_executed_unless_listed =>
        not_executed("whereabouts", &json!({"log_file": "/etc/evil", "range": "10.9.0.0/24"}));
    a_shell_script_in_the_path_is_not_executed => not_executed("helper.sh", &json!({}));
    the_case_of_a_name_does_not_matter_to_the_list => not_executed("Rdma-Ipam", &json!({}));
    a_space_behind_an_allowed_name_does_not_pass => not_executed("static ", &json!({}));
    a_newline_behind_an_allowed_name_does_not_pass => not_executed("static\n", &json!({}));
    a_relative_path_is_not_executed => path("../helper");
    a_path_below_is_not_executed => path("./helper");
    a_path_through_an_allowed_name_is_not_executed => path("static/../helper");
    an_absolute_path_is_not_executed => absolute();
    an_empty_type_is_refused => path("");
    a_dot_is_refused => path(".");
    two_dots_are_refused => path("..");
    a_nul_in_the_type_is_refused => path("static\0helper");
    a_type_of_5000_bytes_is_refused_in_few_words => long();
    a_type_that_is_no_string_is_refused => no_string();
    the_second_of_two_types_is_not_executed: Macvlan => two_types();
    a_key_in_other_case_does_not_smuggle_a_type: Macvlan => folded();
    this_plugin_is_not_executed_even_if_listed => never();
    a_listed_program_is_executed: Macvlan => listed();
    static_is_listed_by_default: Macvlan, ReferencePlugins => reference_static();
    a_network_chooses_no_address_itself_where_static_is_not_listed: Macvlan => chosen_addresses();
    whereabouts_is_ours_where_it_is_installed_so_and_writes_no_log: Macvlan => our_whereabouts();
    del_check_status_and_gc_execute_no_more_than_add => other_commands();
    del_executes_no_program_that_left_the_list: Macvlan => list_shrank();
    del_succeeds_when_the_ipam_program_is_gone: Macvlan => gone(Del::Missing, "macvlan");
    gc_ends_an_attachment_whose_ipam_program_is_gone: Macvlan => gone_before_gc();
    del_returns_the_nic_when_the_ipam_program_is_gone => gone(Del::Missing, "move");
    del_succeeds_when_the_ipam_program_is_no_program_any_more: Macvlan => gone(Del::NoProgram, "macvlan");
    del_returns_the_nic_when_the_ipam_program_fails => gone(Del::Fails, "move");
    a_message_of_a_mebibyte_is_bounded: Macvlan => huge_message();
    a_mebibyte_on_a_delegates_stderr_is_bounded: Macvlan => huge_stderr();
    control_bytes_of_a_delegate_are_escaped: Macvlan => escapes();
    a_delegates_error_with_code_zero_is_not_ours: Macvlan => code("0");
    a_delegates_error_with_a_negative_code_is_not_ours: Macvlan => code("-3");
    a_delegates_error_with_a_huge_code_is_not_ours: Macvlan => code("99999999999999999999");
    a_delegates_error_with_a_code_that_is_text_is_not_ours: Macvlan => code("\"7\"");
    a_delegates_error_with_exit_zero_is_an_error: Macvlan => error_with_exit_zero();
    an_answer_of_16_mebibytes_ends_in_bounded_time: Macvlan => huge_answer();
    addresses_that_an_ipam_invents_do_not_reach_the_host: Macvlan => invented();
}

/// A directory of programs, with one under a name that writes down that it was executed.
fn install(scene: &Scene, name: &str, body: &str) -> Result<PathBuf> {
    let directory = scene.host.directory().join("plugins");
    fs::create_dir_all(&directory)?;
    let file = directory.join(name);
    let marker = marker(scene);
    fs::write(
        &file,
        format!(
            "#!/bin/sh\necho $CNI_COMMAND >> '{}'\n{body}\n",
            marker.display()
        ),
    )?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
    Ok(file)
}

fn marker(scene: &Scene) -> PathBuf {
    scene.host.directory().join("executed")
}

/// The commands that were executed.
pub(super) fn executed(scene: &Scene) -> String {
    let text = fs::read_to_string(marker(scene)).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A program in the path that writes down that it was executed, and the call that has this path.
pub(super) fn with_program(name: &str, body: &str) -> Result<(Scene, Call)> {
    let scene = Scene::furnished()?;
    install(&scene, name, body)?;
    let mut call = scene.call();
    call.path = scene.host.directory().join("plugins").into();
    Ok((scene, call))
}

pub(super) const ANSWER: &str =
    r#"[ $CNI_COMMAND != ADD ] || echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.7/24"}]}'"#;

pub(super) fn upon_nic0(scene: &Scene, ipam: &Value) -> Value {
    scene.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": ipam}))
}

fn not_executed(name: &str, keys: &Value) -> Result<()> {
    let (scene, call) = with_program(name, ANSWER)?;
    let mut ipam = keys.clone();
    ipam["type"] = name.into();
    let policy = scene.policy_file();
    let policy = policy.to_string_lossy();
    let words = match name {
        "rdma-netdev" => ["not an IPAM plugin", name],
        _ => ["allow.ipam", &*policy],
    };
    scene.refuses_call(&call, &upon_nic0(&scene, &ipam), &[DENIED], &words)?;
    let mut moving = scene.moving();
    moving["ipam"] = ipam;
    scene.refuses_call(&call, &moving, &[DENIED], &words)?;
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

fn dhcp() -> Result<()> {
    let (scene, call) = with_program("dhcp", ANSWER)?;
    scene.allow(&json!({"ipam": ["rdma-ipam", "dhcp"]}))?;
    let ipam = json!({"type": "dhcp", "daemonSocketPath": "/run/evil.sock"});
    let words = [
        "ipam.type: dhcp",
        "rdma-ipam, whereabouts, host-local or static",
    ];
    scene.refuses_call(&call, &upon_nic0(&scene, &ipam), &[UNSUPPORTED], &words)?;
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

fn refused_type(kind: &Value) -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    install(&scene, "static", ANSWER)?;
    fs::copy(
        scene.host.directory().join("plugins/helper"),
        scene.host.directory().join("helper"),
    )?;
    let network = upon_nic0(&scene, &json!({"type": kind}));
    scene.refuses_call(&call, &network, &[DENIED, INVALID_NETWORK], &["ipam"])?;
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

fn path(kind: &str) -> Result<()> {
    refused_type(&kind.into())
}

fn no_string() -> Result<()> {
    for kind in [
        json!(["static"]),
        json!({"name": "static"}),
        json!(7),
        json!(true),
    ] {
        refused_type(&kind)?;
    }
    Ok(())
}

fn absolute() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    let program = scene.host.directory().join("plugins/helper");
    let network = upon_nic0(&scene, &json!({"type": program}));
    scene.refuses_call(&call, &network, &[DENIED, INVALID_NETWORK], &["ipam"])?;
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

fn long() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    let network = upon_nic0(&scene, &json!({"type": "x".repeat(5000)}));
    scene.refuses_call(&call, &network, &[DENIED, INVALID_NETWORK], &["ipam"])?;
    let answer = answer_of(&call, "ADD", &network)?;
    let said = answer.stdout.len() + answer.stderr.len();
    ensure!(said < 4000, "{said} bytes about one name");
    Ok(())
}

/// What a parser that takes the first and one that takes the last would read differently.
fn two_types() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    install(&scene, "static", ANSWER)?;
    let before = scene.host_state()?;
    for ipam in [
        r#"{"type":"static","type":"helper"}"#,
        r#"{"type":"helper","type":"static"}"#,
    ] {
        let document = format!(
            r#"{{"cniVersion":"1.0.0","name":"rail0","type":"rdma-netdev","attach":"macvlan","master":"nic0","ipam":{ipam}}}"#
        );
        let answer = e2e::scene::answer_to(&call, "ADD", document.as_bytes())?;
        refusal(&answer, &[6, 7, DENIED], &[])?;
        unchanged(&before, || scene.host_state(), "after the refusal")?;
    }
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

/// A delegate reads the whole document, and as a Go program it folds the case of keys.
fn folded() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    install(&scene, "static", ANSWER)?;
    let before = scene.host_state()?;
    for document in [
        r#"{"cniVersion":"1.0.0","name":"rail0","type":"rdma-netdev","attach":"macvlan","master":"nic0","IPAM":{"type":"helper"}}"#,
        r#"{"cniVersion":"1.0.0","name":"rail0","type":"rdma-netdev","attach":"macvlan","master":"nic0","ipam":{"type":"static"},"IPAM":{"type":"helper"}}"#,
        r#"{"cniVersion":"1.0.0","name":"rail0","type":"rdma-netdev","attach":"macvlan","master":"nic0","ipam":{"Type":"helper"}}"#,
        r#"{"cniVersion":"1.0.0","name":"rail0","type":"rdma-netdev","attach":"macvlan","master":"nic0","ipam":{"type":"static","TYPE":"helper"}}"#,
    ] {
        let answer = e2e::scene::answer_to(&call, "ADD", document.as_bytes())?;
        refusal(&answer, &[6, 7, DENIED], &[]).with_context(|| document.to_owned())?;
        unchanged(&before, || scene.host_state(), "after the refusal")?;
    }
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

fn never() -> Result<()> {
    let (scene, call) = with_program("rdma-netdev", ANSWER)?;
    for name in ["rdma-netdev", "rdma"] {
        install(&scene, name, ANSWER)?;
        scene.allow(&json!({"ipam": [name, "rdma-ipam"]}))?;
        let network = upon_nic0(&scene, &json!({"type": name}));
        scene.refuses_call(&call, &network, &[DENIED], &[name])?;
    }
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

fn listed() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    scene.allow(&json!({"ipam": ["helper"]}))?;
    let before = scene.host_state()?;
    let network = upon_nic0(&scene, &json!({"type": "helper"}));
    answer_of(&call, "ADD", &network)?.success()?;
    ensure!(
        scene.pod.ip("addr show net1")?.contains("10.9.0.7/24"),
        "no address"
    );
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")?;
    // Without a record, it may have a lease all the same.
    answer_of(&call, "DEL", &network)?.success()?;
    ensure!(executed(&scene) == "ADD DEL DEL", "{}", executed(&scene));
    // What is not on the list any more is not executed, our own neither.
    let own = upon_nic0(
        &scene,
        &scene.host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({})),
    );
    scene.refuses_call(&call, &own, &[DENIED], &["rdma-ipam", "allow.ipam"])
}

fn reference_static() -> Result<()> {
    let scene = Scene::furnished()?;
    let ipam = json!({"type": "static", "addresses": [{"address": "10.9.0.7/24"}]});
    let mut network = upon_nic0(&scene, &ipam);
    network["cniVersion"] = "1.0.0".into();
    scene.returns(&network, &[])
}

fn chosen_addresses() -> Result<()> {
    let scene = Scene::furnished()?;
    let chosen = "10.9.0.7/24";
    let ipam = scene.host.own_ipam(
        "10.9.0.0/24",
        "10.9.0.100",
        &json!({"addresses": [{"address": chosen}]}),
    );
    let fixed = upon_nic0(&scene, &ipam);
    let chained = scene.network(&json!({"attach": "ipvlan", "master": "nic0",
        "prevResult": {"cniVersion": "1.1.0", "ips": [{"address": chosen}]}}));
    scene.returns(&fixed, &[])?;
    scene.allow(&json!({"ipam": ["rdma-ipam"]}))?;
    for (network, word) in [(&fixed, "ipam.addresses"), (&chained, "prevResult")] {
        scene.refuses(network, &[DENIED], &[word, "allow.ipam", "static"])?;
    }
    Ok(())
}

/// A call on a node where whereabouts is a link to our IPAM, in the directory `plugins`.
pub(super) fn as_whereabouts(scene: &Scene) -> Result<Call> {
    let plugins = scene.host.directory().join("plugins");
    fs::create_dir_all(&plugins)?;
    symlink(product("rdma-ipam")?, plugins.join("rdma-ipam"))?;
    symlink("rdma-ipam", plugins.join("whereabouts"))?;
    let mut call = scene.call();
    call.path = plugins.into();
    Ok(call)
}

fn our_whereabouts() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.allow(&json!({"ipam": ["rdma-ipam"]}))?;
    let call = as_whereabouts(&scene)?;
    let before = scene.host_state()?;
    let log = scene.host.directory().join("whereabouts.log");
    let network = upon_nic0(
        &scene,
        &json!({"type": "whereabouts", "range": "10.9.0.0/24", "range_start": "10.9.0.50",
            "log_file": log, "log_level": "debug"}),
    );
    answer_of(&call, "ADD", &network)?.success()?;
    ensure!(
        scene.pod.ip("addr show net1")?.contains("10.9.0.50/24"),
        "no address"
    );
    // The link is gone before the pod is: its leases are ours all the same.
    fs::remove_file(scene.host.directory().join("plugins/whereabouts"))?;
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")?;
    ensure!(!log.exists(), "it writes a log where a tenant says");
    Ok(())
}

fn other_commands() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    let mut network = upon_nic0(&scene, &json!({"type": "helper"}));
    network["cni.dev/valid-attachments"] = json!([]);
    network["prevResult"] = json!({"cniVersion": "1.1.0", "interfaces": [{"name": "net1", "sandbox": scene.pod.path()}]});
    let before = scene.host_state()?;
    for command in ["CHECK", "STATUS", "GC", "DEL"] {
        answer_of(&call, command, &network)?;
        unchanged(&before, || scene.host_state(), command)?;
    }
    answer_of(&call, "DEL", &network)?
        .success()
        .context("DEL")?;
    ensure!(
        executed(&scene).is_empty(),
        "executed for {}",
        executed(&scene)
    );
    Ok(())
}

fn gone_before_gc() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    scene.allow(&json!({"ipam": ["helper"]}))?;
    let before = scene.host_state()?;
    let mut network = upon_nic0(&scene, &json!({"type": "helper"}));
    answer_of(&call, "ADD", &network)?.success()?;
    fs::remove_file(scene.host.directory().join("plugins/helper"))?;
    network["cni.dev/valid-attachments"] = json!([]);
    let answer = answer_of(&call, "GC", &network)?;
    answer.success()?;
    ensure!(
        answer.stderr.contains("helper") && answer.stderr.contains("c1"),
        "{}",
        answer.stderr
    );
    ensure!(
        scene.pod.ip("link show net1").is_err(),
        "net1 is left in the pod"
    );
    unchanged(&before, || scene.host_state(), "after GC")
}

/// A pod from before the list became shorter: its interface ends, its record and its lease stay until
/// the program is listed again.
fn list_shrank() -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    scene.allow(&json!({"ipam": ["helper"]}))?;
    let before = scene.host_state()?;
    let network = upon_nic0(&scene, &json!({"type": "helper"}));
    answer_of(&call, "ADD", &network)?.success()?;
    scene.allow(&json!({}))?;
    let answer = answer_of(&call, "DEL", &network)?;
    refusal(&answer, &[DENIED], &["helper", "allow.ipam"])?;
    ensure!(
        scene.pod.ip("link show net1").is_err(),
        "net1 is left in the pod"
    );
    ensure!(executed(&scene) == "ADD", "{}", executed(&scene));
    scene.allow(&json!({"ipam": ["helper"]}))?;
    answer_of(&call, "DEL", &network)?.success()?;
    ensure!(executed(&scene) == "ADD DEL", "{}", executed(&scene));
    unchanged(&before, || scene.host_state(), "after DEL")
}

#[derive(Clone, Copy, PartialEq)]
enum Del {
    Missing,
    NoProgram,
    Fails,
}

fn gone(how: Del, attach: &str) -> Result<()> {
    let (scene, call) = with_program("helper", ANSWER)?;
    let log = scene.host.directory().join("cni.log");
    scene.policy(
        &json!({"ipam": ["helper"]}),
        &json!({"log": {"file": log, "level": "warn"}}),
    )?;
    let before = scene.host_state()?;
    let mut network = upon_nic0(&scene, &json!({"type": "helper"}));
    if attach == "move" {
        network = scene.moving();
        network["ipam"] = json!({"type": "helper"});
    }
    answer_of(&call, "ADD", &network)?
        .success()
        .context("ADD")?;
    let program = scene.host.directory().join("plugins/helper");
    match how {
        Del::Missing => fs::remove_file(&program)?,
        Del::NoProgram => fs::write(&program, "no program")?,
        Del::Fails => drop(install(
            &scene,
            "helper",
            "echo '{\"code\":11,\"msg\":\"not now\"}'; exit 1",
        )?),
    }
    let answer = answer_of(&call, "DEL", &network)?;
    ensure!(
        scene.pod.ip("link show net1").is_err(),
        "net1 is left in the pod"
    );
    // A program that fails may have kept its lease: the runtime is to send DEL again.
    if how != Del::Fails {
        answer.success().context("DEL")?;
        let said = fs::read_to_string(&log).unwrap_or_default() + &answer.stderr;
        ensure!(
            said.contains("helper"),
            "no warning about the program: {said:?}"
        );
    } else if !answer.status.success() {
        install(&scene, "helper", ANSWER)?;
        answer_of(&call, "DEL", &network)?
            .success()
            .context("DEL, with the program repaired")?;
    }
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// ADD with a program of this body is refused; the answer, and what the log has.
fn answered(body: &str) -> Result<(e2e::cni::Answer, String)> {
    let (scene, call) = with_program("helper", body)?;
    let log = scene.host.directory().join("cni.log");
    scene.policy(
        &json!({"ipam": ["helper"]}),
        &json!({"log": {"file": log, "level": "debug"}}),
    )?;
    let before = scene.host_state()?;
    let network = upon_nic0(&scene, &json!({"type": "helper"}));
    let answer = answer_of(&call, "ADD", &network)?;
    ensure!(
        scene.pod.ip("link show net1").is_err(),
        "net1 is left in the pod"
    );
    answer_of(&call, "DEL", &network)?;
    unchanged(
        &before,
        || scene.host_state(),
        "after the refused ADD and DEL",
    )?;
    Ok((
        answer,
        String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned(),
    ))
}

const BOUND_BYTES: usize = 64 * 1024;

fn huge_message() -> Result<()> {
    let body = r#"[ $CNI_COMMAND = ADD ] || exit 0
        printf '{"cniVersion":"1.0.0","code":11,"msg":"'; head -c 1048576 /dev/zero | tr '\0' x; echo '"}'; exit 1"#;
    let (answer, log) = answered(body)?;
    refusal(&answer, &[], &["helper"])?;
    ensure!(
        answer.stdout.len() < BOUND_BYTES,
        "{} bytes on stdout",
        answer.stdout.len()
    );
    ensure!(
        answer.stderr.len() < BOUND_BYTES,
        "{} bytes on stderr",
        answer.stderr.len()
    );
    ensure!(log.len() < 4 * BOUND_BYTES, "{} bytes of log", log.len());
    Ok(())
}

fn huge_stderr() -> Result<()> {
    let body = r#"head -c 1048576 /dev/zero | tr '\0' x >&2
        echo '{"cniVersion":"1.0.0","code":11,"msg":"later"}'; exit 1"#;
    let (answer, log) = answered(body)?;
    ensure!(answer.refusal()?.0 == 11, "{}", answer.stdout);
    ensure!(
        answer.stderr.len() < BOUND_BYTES,
        "{} bytes on stderr",
        answer.stderr.len()
    );
    ensure!(log.len() < 4 * BOUND_BYTES, "{} bytes of log", log.len());
    Ok(())
}

fn escapes() -> Result<()> {
    let body = r#"printf '\033[31mred\033]0;title\007\n2030-01-01T00:00:00Z forged\r\n' >&2
        printf '{"cniVersion":"1.0.0","code":11,"msg":"a\\u001b[31mb\\n2030-01-01T00:00:00Z forged\\u0007","details":"\\u009b31m"}'; exit 1"#;
    let (answer, log) = answered(body)?;
    answer.refusal()?;
    for (what, text) in [("stderr", &answer.stderr), ("the log", &log)] {
        plain(what, text)?;
        let forged = text.lines().find(|line| line.starts_with("2030-01-01"));
        ensure!(
            forged.is_none(),
            "a delegate's line in {what} passes for one of ours: {forged:?}"
        );
    }
    Ok(())
}

/// No control character but the newline.
pub(crate) fn plain(what: &str, text: &str) -> Result<()> {
    let odd = text
        .chars()
        .find(|c| (c.is_control() && *c != '\n') || *c == char::REPLACEMENT_CHARACTER);
    ensure!(odd.is_none(), "{what} has {odd:?} in it: {text:?}");
    Ok(())
}

fn code(code: &str) -> Result<()> {
    let body = format!(
        r#"[ $CNI_COMMAND = ADD ] || exit 0
        echo '{{"cniVersion":"1.0.0","code":{code},"msg":"odd"}}'; exit 1"#
    );
    let (answer, _) = answered(&body)?;
    let (number, message) = answer.refusal()?;
    ensure!((1..1000).contains(&number), "code {number}: {message}");
    Ok(())
}

fn error_with_exit_zero() -> Result<()> {
    let body = r#"echo '{"cniVersion":"1.0.0","code":11,"msg":"later"}'"#;
    let (answer, _) = answered(body)?;
    answer.refusal().map(drop)
}

fn huge_answer() -> Result<()> {
    let body = r#"[ $CNI_COMMAND = ADD ] || exit 0
        printf '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.7/24"}],"pad":"'; head -c 16777216 /dev/zero | tr '\0' x; echo '"}'"#;
    let (answer, log) = answered(body)?;
    ensure!(
        answer.stdout.len() < BOUND_BYTES,
        "{} bytes on stdout",
        answer.stdout.len()
    );
    ensure!(log.len() < 4 * BOUND_BYTES, "{} bytes of log", log.len());
    Ok(())
}

/// Addresses and routes of an answer concern the pod alone, whatever they are.
fn invented() -> Result<()> {
    for ips in [
        r#"[{"address":"10.9.0.7/24","interface":7}]"#,
        r#"[{"address":"10.9.0.7/24","interface":-1}]"#,
        r#"[{"address":"10.9.0.7/33"}]"#,
        r#"[{"address":"224.0.0.1/4"}]"#,
        r#"[{"address":"::1/128"}]"#,
        r#"[{"address":"0.0.0.0/0"}]"#,
    ] {
        let body =
            format!(r#"[ $CNI_COMMAND != ADD ] || echo '{{"cniVersion":"1.0.0","ips":{ips}}}'"#);
        let (scene, call) = with_program("helper", &body)?;
        scene.allow(&json!({"ipam": ["helper"]}))?;
        let before = scene.host_state()?;
        let network = upon_nic0(&scene, &json!({"type": "helper"}));
        let answer = answer_of(&call, "ADD", &network)?;
        if !answer.status.success() {
            refusal(&answer, &[], &[]).with_context(|| ips.to_owned())?;
        }
        answer_of(&call, "DEL", &network)?.success()?;
        unchanged(&before, || scene.host_state(), ips)?;
    }
    Ok(())
}
