//! `rdmactl validate`: a configuration's mistakes are reported before a roll-out.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::daemon::Machine;
use e2e::harness::Case;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(pool_files_of_the_examples_are_accepted),
    case!(examples_request_resources_that_an_install_offers),
    case!(mpijobs_wait_for_workers_and_set_the_replicas_restart_policy),
    case!(the_rdma_shared_device_plugins_file_means_what_it_meant),
    case!(each_mistake_is_reported_with_its_place),
    case!(all_mistakes_are_in_one_json_document),
    case!(an_hca_of_two_pools_is_a_mistake_where_it_is, Root),
    case!(a_pool_without_a_healthy_hca_is_a_mistake_on_that_host, Root),
    case!(a_published_network_is_read_as_kubectl_reads_it),
];

fn validate(file: &Path, flags: &[&str]) -> Result<Output> {
    let mut command = Command::new(product("rdmactl")?);
    Ok(command.arg("validate").args(flags).arg(file).output()?)
}

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("manifests")
}

fn pool_files_of_the_examples_are_accepted() -> Result<()> {
    let mut files = Vec::new();
    for example in fs::read_dir(manifests().join("examples"))? {
        let file = example?.path().join("pools.json");
        files.extend(file.exists().then_some(file));
    }
    ensure!(!files.is_empty(), "no pool file");
    for file in files {
        let output = validate(&file, &[])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{}: {said}", file.display());
    }
    Ok(())
}

/// Resources of the chart's default and of its profiles. The examples' own pool files offer the default's.
fn offered() -> Result<BTreeSet<String>> {
    let mut offered = BTreeSet::new();
    let base = fs::read_to_string(manifests().join("base/rdma-netdev.yaml"))?;
    let lines = base.lines().map(str::trim);
    let default =
        lines.filter_map(|line| line.strip_prefix("\"resource\": \"")?.strip_suffix("\","));
    offered.extend(default.map(str::to_owned));
    for profile in fs::read_dir(manifests().join("chart/values"))? {
        let values: Value = serde_saphyr::from_str(&fs::read_to_string(profile?.path())?)?;
        let pools = values.pointer("/pools/pools").and_then(Value::as_array);
        for pool in pools.into_iter().flatten() {
            offered.extend(pool["resource"].as_str().map(str::to_owned));
        }
    }
    Ok(offered)
}

fn examples_request_resources_that_an_install_offers() -> Result<()> {
    let offered = offered()?;
    ensure!(offered.len() >= 4, "only {offered:?}");
    for example in fs::read_dir(manifests().join("examples"))? {
        let example = example?.path();
        if !example.is_dir() {
            continue;
        }
        for file in fs::read_dir(example)? {
            let file = file?.path();
            if file.extension().is_none_or(|extension| extension != "yaml") {
                continue;
            }
            // A JSON patch escapes the slash in a path.
            let text = fs::read_to_string(&file)?.replace("~1", "/");
            for (position, _) in text.match_indices("rdma/") {
                let rest = &text[position..];
                let is_of_name = |c: char| c.is_ascii_alphanumeric() || "/_-.".contains(c);
                let name = &rest[..rest.find(|c| !is_of_name(c)).unwrap_or(rest.len())];
                let name = name.trim_end_matches('.');
                ensure!(offered.contains(name), "{}: {name}", file.display());
            }
        }
    }
    Ok(())
}

/// The examples have one MPI job; the others are patches of it.
fn mpijobs_wait_for_workers_and_set_the_replicas_restart_policy() -> Result<()> {
    let text = fs::read_to_string(manifests().join("examples/mpijob/mpijob.yaml"))?;
    let job: Value = serde_saphyr::from_str(&text)?;
    let spec = &job["spec"];
    assert_eq!(spec["launcherCreationPolicy"], "WaitForWorkersReady");
    assert_eq!(
        spec["mpiReplicaSpecs"]["Launcher"]["restartPolicy"],
        "OnFailure"
    );
    for role in ["Launcher", "Worker"] {
        let pod = &spec["mpiReplicaSpecs"][role]["template"]["spec"];
        ensure!(pod["containers"].is_array(), "{role}");
        assert_eq!(pod["restartPolicy"], Value::Null, "{role}");
    }
    Ok(())
}

fn the_rdma_shared_device_plugins_file_means_what_it_meant() -> Result<()> {
    let file = manifests().join("examples/perftest/pools.json");
    let output = validate(&file, &["--json"])?;
    let read: Value = serde_json::from_slice(&output.stdout)?;
    let pool = read.pointer("/files/0/pools/0").context("no pool")?;
    assert_eq!(pool["resource"], "rdma/hca_shared_devices_a");
    assert_eq!(pool["units"], "63 units, each with all HCAs");
    assert_eq!(
        pool["selectors"],
        json!(["ifNames: ens2f0; functions: pf or vf or sf"])
    );
    Ok(())
}

fn each_mistake_is_reported_with_its_place() -> Result<()> {
    let resource = |text: &str| format!("{{\"configList\": [{{{text}}}]}}");
    let mistakes = [
        (
            resource(r#""resourceName": "a-b", "devices": ["e0"]"#),
            "'-'",
        ),
        (
            resource(r#""resourceName": "a", "rdmaHcaMax": 1"#),
            "configList[0]: no selector",
        ),
        (
            resource(r#""resourceName": "a", "rdmaHcaMax": -1, "devices": ["e0"]"#),
            "-1",
        ),
        (
            "version: 1\npools:\n- resource: rdma/a\n  mode: shard\n".to_owned(),
            "line 4",
        ),
        ("version: 1\npols: []\n".to_owned(), "pools"),
        // The other resource is served, and this one is a mistake all the same.
        (
            resource(
                r#""resourceName": "a-b", "devices": ["e0"]}, {"resourceName": "b", "devices": ["e0"]"#,
            ),
            "configList[0]",
        ),
        (String::new(), "nothing to check"),
    ];
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("config");
    for (text, expected) in mistakes {
        fs::write(&file, &text)?;
        let output = validate(&file, &[])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(1),
            "{text}\nended with {}",
            output.status
        );
        ensure!(said.contains(expected), "{text}\nsaid: {said}");
        let printed = String::from_utf8_lossy(&output.stdout);
        ensure!(
            !printed.contains("rdma/a"),
            "{text}\nprinted as if it were valid: {printed}"
        );
    }
    Ok(())
}

fn all_mistakes_are_in_one_json_document() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("config");
    let errors = |text: &str| -> Result<Vec<String>> {
        fs::write(&file, text)?;
        let output = validate(&file, &["--json"])?;
        ensure!(output.status.code() == Some(1), "{output:?}");
        let printed: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stdout).into_owned())?;
        let checked = &printed["files"][0];
        assert_eq!(
            (&printed["version"], &checked["valid"]),
            (&1.into(), &false.into())
        );
        assert_eq!(checked["file"], file.to_str().context("path")?);
        Ok(serde_json::from_value(checked["errors"].clone())?)
    };
    // Both, not the first.
    let two = "version: 1\npools:\n\
               - {resource: rdma/a, mode: exclusive, shares: 2, select: {functions: [pf]}}\n\
               - {resource: rdma/b, mode: shared, strict: true, select: {functions: [pf]}}\n";
    let said = errors(two)?;
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said.iter().any(|error| error.contains("line 4")),
        "{said:?}"
    );
    let said = errors("{\"configList\": [")?;
    assert_eq!(said.len(), 1, "{said:?}");
    // One resource is served, the other is a mistake all the same.
    let half = r#"{"configList": [{"resourceName": "a-b", "devices": ["e0"]}, {"resourceName": "b", "devices": ["e0"]}]}"#;
    let said = errors(half)?;
    assert!(
        said.iter().any(|error| error.contains("configList[0]")),
        "{said:?}"
    );
    Ok(())
}

fn an_hca_of_two_pools_is_a_mistake_where_it_is() -> Result<()> {
    let machine = Machine::new()?;
    let config = machine.directory().join("pools.yaml");
    let pools = |modes: [&str; 2]| {
        let pool = |(name, mode, devices): (&str, &str, &str)| {
            let optional = name == "c";
            format!(
                "- {{resource: rdma/{name}, mode: {mode}, optional: {optional}, select: {{rdmaDevices: \
                 [{devices}]}}}}\n"
            )
        };
        let [first, second] = modes;
        let pools = [
            ("a", first, "mlx5_0, mlx5_1"),
            ("b", second, "mlx5_1"),
            ("c", "shared", "mlx5_9"),
        ];
        format!("version: 1\npools:\n{}", pools.map(pool).concat())
    };
    let on_host = |modes: [&str; 2], more: &[&str]| -> Result<(Option<i32>, String, String)> {
        fs::write(&config, pools(modes))?;
        let host = machine.directory().join("host");
        let root = host.to_str().context("path")?;
        let output = Command::new(product("rdmactl")?)
            .args(["validate", "--on-host", "--host-root", root])
            .args(more)
            .arg(&config)
            .output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        ))
    };
    let (code, said, complaint) = on_host(["shared", "exclusive"], &[])?;
    assert_eq!(code, Some(1), "{said}");
    for part in ["chosen by rdma/a and by rdma/b", "narrow the selectors"] {
        assert!(complaint.contains(part), "{part}: {complaint}");
    }
    assert!(said.contains("on this host: none"), "{said}");
    let (code, said, _) = on_host(["shared", "shared"], &[])?;
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("on this host: mlx5_0 (0000:3b:00.0), mlx5_1 ("),
        "{said}"
    );
    let (_, said, _) = on_host(["shared", "shared"], &["--json"])?;
    let read: Value = serde_json::from_str(&said)?;
    assert_eq!(
        read["files"][0]["pools"][1]["onHost"]
            .as_array()
            .map(Vec::len),
        Some(1),
        "{said}"
    );
    // The file itself is in order: another host may have no HCA that both choose.
    fs::write(&config, pools(["shared", "exclusive"]))?;
    assert!(validate(&config, &[])?.status.success());
    Ok(())
}

fn a_pool_without_a_healthy_hca_is_a_mistake_on_that_host() -> Result<()> {
    let machine = Machine::new()?;
    let state = machine
        .tree
        .path("/sys/class/infiniband/mlx5_1/ports/1/state");
    fs::write(state, "1: DOWN\n")?;
    let config = machine.directory().join("pools.yaml");
    let host = machine.directory().join("host");
    let root = host.to_str().context("path")?;
    let on_host = |devices: &str, optional: bool| -> Result<(Option<i32>, String)> {
        fs::write(
            &config,
            format!(
                "version: 1\npools:\n- resource: rdma/a\n  mode: exclusive\n  optional: {optional}\n  \
                 select: {{rdmaDevices: [{devices}]}}\n"
            ),
        )?;
        let output = validate(&config, &["--on-host", "--host-root", root])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((output.status.code(), said))
    };
    assert_eq!(on_host("mlx5_0, mlx5_1", false)?, (Some(0), String::new()));
    for (devices, reason) in [
        ("mlx5_9", "selectors match none"),
        ("mlx5_1", "mlx5_1/1 is DOWN"),
    ] {
        let (code, said) = on_host(devices, false)?;
        ensure!(code == Some(1), "{devices}: {code:?} {said}");
        for part in [
            "rdma/a has no healthy HCA on this host",
            reason,
            "optional: true",
        ] {
            ensure!(said.contains(part), "{devices}: no {part} in {said}");
        }
        assert_eq!(on_host(devices, true)?, (Some(0), String::new()));
    }
    Ok(())
}

/// Multus' own examples are written so.
fn a_published_network_is_read_as_kubectl_reads_it() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("network.yaml");
    fs::write(
        &file,
        "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata:\n  name: a\nspec:\n  \
         config: '{\n\"cniVersion\": \"1.0.0\",\n\"type\": \"rdma-netdev\",\n\"attach\": \"macvlan\",\n\
         \"master\": \"ens1\"\n}'\n",
    )?;
    let output = validate(&file, &[])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    Ok(())
}
