//! Networks with keys that are nearly right, of other plugins, or of the wrong type; arguments
//! that are unknown; a state directory that others can change.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::cases;
use e2e::host_state::unchanged;
use e2e::scene::{
    DENIED, INVALID_ENVIRONMENT, INVALID_NETWORK, STATE, Scene, TRY_AGAIN, answer_of, refusal,
};
use serde_json::{Value, json};

cases! {
    atach_is_refused_for_attach => typo("atach", json!("move"), "attach");
    link_in_contaner_is_refused_for_link_in_container =>
        typo("linkInContaner", json!(true), "linkInContainer");
    runtime_confg_is_refused_for_runtime_config => typo("runtimeConfg", json!({}), "runtimeConfig");
    keys_of_other_plugins_without_effect_are_noted: Macvlan => others();
    keys_in_the_case_that_go_accepts_are_ours: Macvlan => folded();
    a_key_twice_in_two_cases_is_refused => folded_twice();
    a_comment_key_with_a_prefix_of_its_own_is_passed_over: Macvlan => prefixed();
    an_mtu_that_is_no_number_in_range_is_refused => mtu();
    a_mac_that_no_host_may_have_is_refused => mac();
    an_unknown_argument_is_refused => arguments("FOO=bar", Some(INVALID_ENVIRONMENT));
    an_unknown_argument_with_ignore_unknown_false_is_refused =>
        arguments("IgnoreUnknown=false;FOO=bar", Some(INVALID_ENVIRONMENT));
    an_unknown_argument_with_ignore_unknown_zero_is_refused =>
        arguments("FOO=bar;IgnoreUnknown=0", Some(INVALID_ENVIRONMENT));
    an_unknown_argument_with_ignore_unknown_nonsense_is_refused =>
        arguments_refused("IgnoreUnknown=maybe;FOO=bar", "IgnoreUnknown");
    an_unknown_argument_with_ignore_unknown_true_is_passed_over: Macvlan => arguments("FOO=bar;IgnoreUnknown=true", None);
    an_unknown_argument_with_ignore_unknown_1_is_passed_over: Macvlan => arguments("IgnoreUnknown=1;FOO=bar", None);
    arguments_of_kubernetes_are_known: Macvlan => arguments(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u",
        None,
    );
    arguments_without_a_value_or_key_are_refused => bad_arguments();
    arguments_of_a_mebibyte_are_refused_or_passed_over: Macvlan => huge_arguments();
    a_state_directory_that_is_a_link_is_refused => state_directory(|state| {
        let real = state.with_file_name("real-state");
        fs::rename(state, &real)?;
        Ok(symlink(&real, state)?)
    });
    a_state_directory_for_everybody_is_refused => state_directory(|state| {
        Ok(fs::set_permissions(state, Permissions::from_mode(0o777))?)
    });
    a_state_directory_for_a_group_is_refused => state_directory(|state| {
        chown(state, Some(0), Some(1234))?;
        Ok(fs::set_permissions(state, Permissions::from_mode(0o775))?)
    });
    a_sticky_state_directory_for_everybody_is_refused => state_directory(|state| {
        Ok(fs::set_permissions(state, Permissions::from_mode(0o1777))?)
    });
    a_state_directory_of_another_user_is_refused => state_directory(|state| {
        Ok(chown(state, Some(1234), Some(1234))?)
    });
    a_journal_of_another_user_is_refused => state_directory(|state| {
        Ok(chown(state.join("attachments"), Some(1234), Some(1234))?)
    });
    a_journal_that_is_a_link_is_refused => state_directory(|state| {
        fs::rename(state.join("attachments"), state.join("elsewhere"))?;
        Ok(symlink(state.join("elsewhere"), state.join("attachments"))?)
    });
    a_policy_that_everybody_may_write_is_refused => policy_file(|path| {
        Ok(fs::set_permissions(path, Permissions::from_mode(0o666))?)
    });
    a_policy_of_another_user_is_refused => policy_file(|path| Ok(chown(path, Some(1234), None)?));
    a_policy_that_is_a_directory_is_refused => policy_file(|path| {
        fs::remove_file(path)?;
        Ok(fs::create_dir(path)?)
    });
    a_policy_that_never_ends_is_refused => policy_file(|path| {
        fs::remove_file(path)?;
        Ok(symlink("/dev/zero", path)?)
    });
    a_policy_of_bytes_is_refused => policy_file(|path| Ok(fs::write(path, [0xff, 0xfe])?));
    a_policy_that_lists_a_path_as_ipam_is_refused_or_reaches_nothing => listed_path();
    a_store_outside_of_the_policy_is_refused: Macvlan => store(&json!("../../etc"));
    a_store_that_is_a_number_is_refused: Macvlan => store(&json!(7));
    a_store_that_is_a_list_is_refused: Macvlan => store(&json!(["default"]));
    a_store_that_is_a_path_is_refused: Macvlan => store(&json!("/etc"));
    a_store_that_the_policy_has_not_is_refused: Macvlan => store(&json!("other"));
    a_range_as_wide_as_the_internet_ends_in_bounded_time: Macvlan => wide_range();
    a_hundred_thousand_excluded_addresses_end_in_bounded_time: Macvlan => many_excluded();
}

fn typo(key: &str, value: Value, nearest: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    for base in [
        json!({"attach": "move", "device": "nic0"}),
        json!({"attach": "macvlan", "master": "nic0"}),
    ] {
        let mut keys = base.clone();
        keys[key] = value.clone();
        scene.refuses(&scene.network(&keys), &[INVALID_NETWORK], &[key, nearest])?;
    }
    Ok(())
}

fn attached(scene: &Scene, keys: &Value) -> Result<()> {
    let before = scene.host_state()?;
    let network = scene.network(keys);
    answer_of(&scene.call(), "ADD", &network)?
        .success()
        .with_context(|| keys.to_string())?;
    scene
        .del_returns(&network, &before)
        .with_context(|| keys.to_string())
}

fn others() -> Result<()> {
    let scene = Scene::furnished()?;
    let keys: Value = serde_json::from_str(
        r#"{
        "promiscMode": true, "hairpinMode": true, "vlanTrunk": [], "preserveDefaultVlan": true,
        "forceAddress": true, "enabledad": true, "dns": {"nameservers": ["10.0.0.1"]}, "isGateway": false,
        "args": {"cni": {"other": 1}}, "capabilities": {"mac": true, "unknown": true}, "disableCheck": true,
        "disableGC": false, "keepV6": true, "bridge": "br0", "sysctl": {}, "promisc": true,
        "allmulti": true, "txQLen": 7, "logLevel": "debug", "logFile": "/nonexistent/never-written", "snat": true,
        "dataDir": "/nonexistent", "dpdkMode": false, "ibKubernetesEnabled": false, "resourceName": "a/b",
        "description": "text", "cni.dev/anything": 1, "cni.dev/valid-attachments": []
        }"#,
    )?;
    for (key, value) in keys.as_object().context("keys")? {
        let mut one = json!({"attach": "macvlan", "master": "nic0"});
        one[key] = value.clone();
        let answer = answer_of(&scene.call(), "ADD", &scene.network(&one))?;
        answer
            .success()
            .with_context(|| format!("with key {key}"))?;
        answer_of(&scene.call(), "DEL", &scene.network(&one))?.success()?;
    }
    let mut all = keys.clone();
    all["attach"] = "macvlan".into();
    all["master"] = "nic0".into();
    attached(&scene, &all)
}

/// Go's decoder folds the case of keys, and so do the files that were written for it.
fn folded() -> Result<()> {
    let scene = Scene::furnished()?;
    attached(
        &scene,
        &json!({"Attach": "macvlan", "MASTER": "nic0", "Mtu": 1400}),
    )
}

fn folded_twice() -> Result<()> {
    let scene = Scene::furnished()?;
    scene.on_host(&[
        "link add decoy type veth peer name decoypeer",
        "link set decoy up",
    ])?;
    for keys in [
        json!({"attach": "macvlan", "master": "decoy", "Master": "nic0"}),
        json!({"attach": "macvlan", "master": "decoy", "ma\u{17f}ter": "nic0"}),
        json!({"attach": "macvlan", "ATTACH": "move", "master": "nic0", "device": "nic0"}),
        json!({"attach": "macvlan", "master": "nic0", "linkInContainer": false, "linkincontainer": true}),
    ] {
        scene.refuses(&scene.network(&keys), &[6, INVALID_NETWORK], &[])?;
    }
    Ok(())
}

fn prefixed() -> Result<()> {
    let scene = Scene::furnished()?;
    attached(
        &scene,
        &json!({"attach": "macvlan", "master": "nic0", "example.com/attach": "x", "_comment": "x", "//": "x"}),
    )
}

fn mtu() -> Result<()> {
    let scene = Scene::furnished()?;
    for value in [
        json!("1400"),
        json!(-1),
        json!(1400.5),
        json!(67),
        json!(65536),
        json!(4_294_968_796_u64),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1e30),
        json!([1400]),
        json!(true),
    ] {
        for base in [
            json!({"attach": "move", "device": "nic0"}),
            json!({"attach": "macvlan", "master": "nic0"}),
        ] {
            let mut keys = base.clone();
            keys["mtu"] = value.clone();
            let answer = answer_of(&scene.call(), "ADD", &scene.network(&keys))?;
            refusal(&answer, &[6, INVALID_NETWORK], &["mtu"]).with_context(|| keys.to_string())?;
        }
    }
    scene.refuses(
        &scene.network(&json!({"attach": "move", "device": "nic0", "mtu": -1})),
        &[INVALID_NETWORK],
        &["mtu"],
    )
}

fn mac() -> Result<()> {
    let scene = Scene::furnished()?;
    for value in [
        "ff:ff:ff:ff:ff:ff",
        "01:00:5e:00:00:01",
        "00:00:00:00:00:00",
        "02:00:00:00:00",
        "02:00:00:00:00:00:01",
        "zz:00:00:00:00:00",
        "",
        "02-00-00-00-00-zz",
    ] {
        for keys in [
            json!({"attach": "move", "device": "nic0", "mac": value}),
            json!({"attach": "move", "device": "nic0", "runtimeConfig": {"mac": value}}),
            json!({"attach": "macvlan", "master": "nic0", "args": {"cni": {"mac": value}}}),
        ] {
            // An empty one is none.
            if value.is_empty() {
                continue;
            }
            let answer = answer_of(&scene.call(), "ADD", &scene.network(&keys))?;
            refusal(&answer, &[], &[]).with_context(|| keys.to_string())?;
            answer_of(&scene.call(), "DEL", &scene.network(&keys))?.success()?;
        }
    }
    scene.refuses(
        &scene.network(&json!({"attach": "move", "device": "nic0", "mac": "ff:ff:ff:ff:ff:ff"})),
        &[],
        &["ff:ff:ff:ff:ff:ff"],
    )
}

fn arguments(text: &str, refused: Option<u64>) -> Result<()> {
    let scene = Scene::furnished()?;
    let mut call = scene.call();
    call.args = text.to_owned();
    let network = scene.child();
    if let Some(code) = refused {
        return scene.refuses_call(&call, &network, &[code], &["CNI_ARGS"]);
    }
    let before = scene.host_state()?;
    answer_of(&call, "ADD", &network)?.success()?;
    answer_of(&call, "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

fn arguments_refused(text: &str, word: &str) -> Result<()> {
    let scene = Scene::furnished()?;
    let mut call = scene.call();
    call.args = text.to_owned();
    scene.refuses_call(&call, &scene.child(), &[INVALID_ENVIRONMENT], &[word])
}

fn bad_arguments() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    for text in [
        "=",
        "=x",
        "a=b=c",
        "IgnoreUnknown",
        "IgnoreUnknown=1;nothing",
        "IgnoreUnknown=1;=;=",
    ] {
        let mut call = scene.call();
        call.args = text.to_owned();
        let answer = answer_of(&call, "ADD", &scene.child())?;
        refusal(&answer, &[INVALID_ENVIRONMENT], &[]).with_context(|| text.to_owned())?;
        answer_of(&call, "DEL", &scene.child())?;
        unchanged(&before, || scene.host_state(), text)?;
    }
    Ok(())
}

fn huge_arguments() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let mut call = scene.call();
    // The kernel ends one variable at 128 KiB.
    call.args = format!("IgnoreUnknown=1;K8S_POD_NAME={}", "x".repeat(120_000));
    let answer = answer_of(&call, "ADD", &scene.child())?;
    if !answer.status.success() {
        refusal(&answer, &[], &[])?;
        ensure!(
            answer.stdout.len() < 64 * 1024,
            "{} bytes of error",
            answer.stdout.len()
        );
    }
    answer_of(&call, "DEL", &scene.child())?;
    answer_of(&scene.call(), "DEL", &scene.child())?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}

/// What `state_directory` spoilt is root's again, and where it was.
fn repair(state: &Path) -> Result<()> {
    for (path, real) in [
        (state.to_owned(), state.with_file_name("real-state")),
        (state.join("attachments"), state.join("elsewhere")),
    ] {
        if path.is_symlink() {
            fs::remove_file(&path)?;
            fs::rename(real, &path)?;
        }
        chown(&path, Some(0), Some(0))?;
        fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Nothing in it is believed, so DEL fails until it is repaired.
fn state_directory(spoil: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = e2e::host_state::state(&scene.host.netns)?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let state = scene.host.state();
    spoil(&state)?;
    let name = state.to_string_lossy();
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    let network = scene.network(&json!({"attach": "macvlan", "master": "peer0"}));
    refusal(&answer_of(&call, "ADD", &network)?, &[], &[&name])?;
    ensure!(
        other.ip("link show net1").is_err(),
        "a refused ADD left its interface"
    );
    let dels = [(&call, network), (&scene.call(), scene.moving())];
    for (call, network) in &dels {
        refusal(&answer_of(call, "DEL", network)?, &[STATE], &[&name])?;
    }
    repair(&state)?;
    for (call, network) in &dels {
        answer_of(call, "DEL", network)?
            .success()
            .context("DEL, repaired")?;
    }
    unchanged(
        &before,
        || e2e::host_state::state(&scene.host.netns),
        "after DEL",
    )
}

fn policy_file(spoil: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let scene = Scene::furnished()?;
    let before = e2e::host_state::state(&scene.host.netns)?;
    answer_of(&scene.call(), "ADD", &scene.moving())?.success()?;
    let policy = scene.policy_file();
    spoil(&policy)?;
    let other = scene.another_pod()?;
    let call = scene.call_of(&other, "c2", "net1");
    let network = scene.network(&json!({"attach": "macvlan", "master": "peer0"}));
    let answer = answer_of(&call, "ADD", &network)?;
    refusal(&answer, &[DENIED], &[&policy.to_string_lossy()])?;
    ensure!(
        other.ip("link show net1").is_err(),
        "a refused ADD left its interface"
    );
    // The state directory stands in the policy.
    let policy_name = policy.to_string_lossy();
    let dels = [(scene.call(), scene.moving()), (call, network)];
    for (call, network) in &dels {
        let answer = answer_of(call, "DEL", network)?;
        refusal(&answer, &[TRY_AGAIN], &[&policy_name])?;
    }
    if policy.is_dir() {
        fs::remove_dir(&policy)?;
    } else {
        fs::remove_file(&policy)?;
    }
    scene.allow(&json!({}))?;
    for (call, network) in &dels {
        answer_of(call, "DEL", network)?
            .success()
            .context("DEL, repaired")?;
    }
    unchanged(
        &before,
        || e2e::host_state::state(&scene.host.netns),
        "after DEL",
    )
}

fn listed_path() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = e2e::host_state::state(&scene.host.netns)?;
    for name in ["../x", "/bin/true", "", ".", "rdma-netdev"] {
        scene.allow(&json!({"ipam": [name, "rdma-ipam"]}))?;
        let network =
            scene.network(&json!({"attach": "macvlan", "master": "nic0", "ipam": {"type": name}}));
        let answer = answer_of(&scene.call(), "ADD", &network)?;
        refusal(&answer, &[DENIED, INVALID_NETWORK], &[]).with_context(|| name.to_owned())?;
        scene.allow(&json!({}))?;
        answer_of(&scene.call(), "DEL", &network)?.success()?;
        unchanged(&before, || e2e::host_state::state(&scene.host.netns), name)?;
    }
    Ok(())
}

fn store(name: &Value) -> Result<()> {
    let scene = Scene::furnished()?;
    let mut network = scene.child();
    network["ipam"]["store"] = name.clone();
    scene.refuses(&network, &[DENIED, INVALID_NETWORK], &["store"])
}

fn wide_range() -> Result<()> {
    let scene = Scene::furnished()?;
    for range in ["0.0.0.0/0", "::/0", "10.0.0.0/1", "fd00::/8"] {
        let before = scene.host_state()?;
        let mut network = scene.child();
        network["ipam"] = json!({"type": "rdma-ipam", "range": range});
        let answer = answer_of(&scene.call(), "ADD", &network)?;
        if !answer.status.success() {
            refusal(&answer, &[], &[])?;
        }
        answer_of(&scene.call(), "DEL", &network)?.success()?;
        unchanged(&before, || scene.host_state(), range)?;
    }
    Ok(())
}

fn many_excluded() -> Result<()> {
    let scene = Scene::furnished()?;
    let before = scene.host_state()?;
    let exclude: Vec<String> = (0..100_000_u32)
        .map(|n| format!("10.{}.{}.{}/32", n >> 16, n >> 8 & 255, n & 255))
        .collect();
    let mut network = scene.child();
    network["ipam"] = json!({"type": "rdma-ipam", "range": "10.0.0.0/8", "exclude": exclude});
    let answer = answer_of(&scene.call(), "ADD", &network)?;
    if !answer.status.success() {
        refusal(&answer, &[], &[])?;
    }
    answer_of(&scene.call(), "DEL", &network)?.success()?;
    unchanged(&before, || scene.host_state(), "after DEL")
}
