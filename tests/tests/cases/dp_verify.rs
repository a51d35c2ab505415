//! What an administrator sees of `rdmactl verify`: two pods, step by step.
//!
//! A script stands in for `kubectl exec` and what the pods would print: two rails, whose tools
//! fail where a case says so. The run with real tools, in pods on soft RoCE, is the lab's.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::harness::Case;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(verify_finds_an_end_without_a_device),
    case!(verify_says_how_a_pod_would_be_reached),
    case!(pods_are_in_the_namespace_of_the_flag_unless_they_name_one),
    case!(a_software_device_does_not_pass_as_to_its_rate),
    case!(each_rail_is_tried_by_its_own_gids_once_the_server_listens),
    case!(a_rail_that_fails_a_step_is_left_out_of_the_next),
    case!(the_connection_manager_is_reported_and_carries_nothing),
    case!(a_path_that_drops_large_packets_is_a_warning),
    case!(a_step_that_is_not_there_is_wrong_usage),
];

/// `kubectl exec POD -- timeout SECONDS TOOL …`. `$FAULTS` has words such as `mr:net1`.
///
/// Strict: another command, an unknown pod or option ends it with a message, as kubectl's own
/// would. A server waits for its client; a client that comes first is refused, once.
const KUBECTL: &str = r#"#!/bin/sh
here=${0%/*}
die() { echo "error: $*" >&2; exit 1; }
faulty() { case " $FAULTS " in *" $1 "*) true;; *) false;; esac; }
[ "$1" = exec ] || die "unknown command \"$1\" for \"kubectl\""
namespace=
[ "$2" = -n ] && namespace=$3/ && shift 2
pod=$2
case $pod in server|client) ;; *) die "pods \"$pod\" not found";; esac
[ "$3" = -- ] && [ "$4" = timeout ] || die "unknown flag: $3"
shift 5
[ "$1" = sh ] || echo "$namespace$pod $*" >>"$here/log"
case $1 in
sh) cat "$here/$pod.facts"; exit;;
ping)
    for address; do :; done
    rail=net${address#10.0.}; rail=${rail%%.*}
    count=3 back=3
    case $* in *" -M do "*) count=1 back=1; faulty large:$rail && back=0;; esac
    faulty ping:$rail && back=0
    echo "$count packets transmitted, $back received, 0% packet loss, time 2ms"
    [ $back -gt 0 ]; exit;;
rping)
    case $* in *10.0.1.1*) rail=net1;; *) rail=net2;; esac
    [ $pod = server ] && exec sleep 0.2
    faulty rping:$rail && { echo "cma event RDMA_CM_EVENT_UNREACHABLE, error -110"; exit 1; }
    for echo in 0 1 2 3 4; do echo "ping data: rdma-ping-$echo: ABC"; done; exit;;
ib_write_bw)
    case $* in *mlx5_0*) rail=net1;; *) rail=net2;; esac
    case $* in *--use_cuda=*) rail=$rail-gpu;; esac
    faulty mr:$rail && { echo "Couldn't allocate MR"; echo " Couldn't create IB resources"; exit 1; }
    if [ $pod = server ]; then
        until [ -e "$here/done.$rail" ]; do sleep 0.05; done
    elif mkdir "$here/early.$rail" 2>/dev/null; then
        echo "Couldn't connect to 10.0.1.1:18515"; exit 1
    else
        : >"$here/done.$rail"
    fi
    cat "$here/table"; exit;;
*) die "OCI runtime exec failed: exec: \"$1\": executable file not found in \$PATH";;
esac
"#;

/// What [`KUBECTL`] lies in, with the facts of both pods.
struct Pods(TempDir);

impl Pods {
    fn new() -> Result<Self> {
        let dir = TempDir::new()?;
        let kubectl = dir.path().join("kubectl");
        fs::write(&kubectl, KUBECTL)?;
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755))?;
        for (pod, host, first) in [("server", 1, 5), ("client", 2, 3)] {
            let mut facts = "tool ping\ntool rping\ntool ib_write_bw\ncm\n".to_owned();
            for rail in [1, 2] {
                let (device, gid) = (rail - 1, first + 8 * rail);
                facts.push_str(&format!(
                    "open mlx5_{device}\nport mlx5_{device} 1 4 100 Ethernet\n\
                     gid mlx5_{device} 1 {gid} 0000:0000:0000:0000:0000:ffff:0a00:0{rail}0{host} \
                     net{rail} 9000 RoCE v2\n\
                     fib |-- 10.0.{rail}.{host}\nfib /32 host LOCAL\n"
                ));
            }
            fs::write(dir.path().join(format!("{pod}.facts")), facts)?;
        }
        let captures = Path::new(env!("CARGO_MANIFEST_DIR"))
            .with_file_name("admin")
            .join("src/verify/captures");
        fs::copy(
            captures.join("write-bw-100g-host.txt"),
            dir.path().join("table"),
        )?;
        Ok(Self(dir))
    }

    /// `verify` between them; the exit code and its document.
    fn verify(&self, faults: &str, arguments: &[&str]) -> Result<(Option<i32>, Value)> {
        let kubectl = self.0.path().join("kubectl");
        let mut command = plugin(&["verify", "pod:server", "pod:client", "--json", "--kubectl"])?;
        let output = command
            .arg(kubectl)
            .args(arguments)
            .env("FAULTS", faults)
            .output()?;
        let report = serde_json::from_slice(&output.stdout).with_context(|| said(&output))?;
        Ok((output.status.code(), report))
    }

    /// The command lines that pods were given, `POD TOOL …`.
    fn log(&self) -> Result<Vec<String>> {
        let log = fs::read_to_string(self.0.path().join("log"))?;
        Ok(log.lines().map(str::to_owned).collect())
    }
}

fn plugin(arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(product("rdmactl")?);
    command.args(arguments).stdin(Stdio::null());
    Ok(command)
}

fn said(output: &Output) -> String {
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&text).into_owned()
}

/// `STEP OBJECT VERDICT` of each finding, without the ends'.
fn verdicts(report: &Value) -> Vec<String> {
    let checks = report["checks"].as_array().into_iter().flatten();
    let findings = checks.flat_map(|check| {
        let findings = check["findings"].as_array().into_iter().flatten();
        findings.map(move |finding| {
            let object = finding["object"].as_str().unwrap_or("-");
            let rail = object.split(' ').next().unwrap_or_default();
            format!(
                "{} {rail} {}",
                word(&check["id"]),
                word(&finding["verdict"])
            )
        })
    });
    findings.filter(|line| !line.starts_with("ends ")).collect()
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn finding<'a>(report: &'a Value, step: &str, rail: &str) -> Result<&'a Value> {
    let checks = report["checks"].as_array().context("checks")?;
    let check = checks
        .iter()
        .find(|check| check["id"] == step)
        .context("step")?;
    let findings = check["findings"].as_array().context("findings")?;
    let of_rail = |finding: &&Value| word(&finding["object"]).starts_with(rail);
    findings
        .iter()
        .find(of_rail)
        .with_context(|| format!("{step} {rail}: {report}"))
}

fn verify_finds_an_end_without_a_device() -> Result<()> {
    let pods = Pods::new()?;
    let (code, report) = pods.verify("", &["--device", "nowhere"])?;
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(report["checks"][0]["verdict"], "fail", "{report}");
    assert_eq!(
        report["checks"][1]["verdict"], "notApplicable",
        "nothing is tried: {report}"
    );
    Ok(())
}

fn verify_says_how_a_pod_would_be_reached() -> Result<()> {
    let pods = Pods::new()?;
    let kubectl = pods.0.path().join("kubectl");
    let mut command = plugin(&["verify", "pod:hpc/gone", "pod:server", "--kubectl"])?;
    let output = command.arg(kubectl).output()?;
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in [
        "pods \"gone\" not found",
        "kubectl exec -n hpc gone -- true",
        "not tried: there is no pair of ports",
        "failed: ends",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    Ok(())
}

fn pods_are_in_the_namespace_of_the_flag_unless_they_name_one() -> Result<()> {
    for (program, before) in [
        ("kubectl-rdma", true),
        ("kubectl-rdma", false),
        ("rdmactl", false),
    ] {
        let pods = Pods::new()?;
        let path = |name: &str| pods.0.path().join(name);
        symlink(product("rdmactl")?, path(program))?;
        let mut words = vec![
            "-n",
            "ml",
            "verify",
            "pod:server",
            "pod:hpc/client",
            "--only=ping",
        ];
        if !before {
            words.rotate_left(2);
        }
        let output = Command::new(path(program))
            .args(words)
            .arg("--kubectl")
            .arg(path("kubectl"))
            .stdin(Stdio::null())
            .output()?;
        assert!(output.status.success(), "{}", said(&output));
        let text = said(&output);
        assert!(text.contains("pod ml/server"), "{text}");
        let log = pods.log()?;
        assert!(
            !log.is_empty() && log.iter().all(|line| line.starts_with("hpc/client ping")),
            "{log:?}"
        );
    }
    Ok(())
}

fn a_software_device_does_not_pass_as_to_its_rate() -> Result<()> {
    let pods = Pods::new()?;
    let facts = pods.0.path().join("client.facts");
    let text = fs::read_to_string(&facts)? + "soft mlx5_0\n";
    fs::write(&facts, text)?;
    let (code, report) = pods.verify("", &["--only", "write-bw"])?;
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(
        verdicts(&report),
        ["write-bw net1 unknown", "write-bw net2 pass"]
    );
    let unknown = finding(&report, "write-bw", "net1")?;
    assert_eq!(
        word(&unknown["why"]),
        "data was transferred; the line rate is unknown"
    );
    let (_, report) = pods.verify("", &["--only", "write-bw", "--line-rate", "100"])?;
    assert_eq!(finding(&report, "write-bw", "net1")?["verdict"], "pass");
    Ok(())
}

fn each_rail_is_tried_by_its_own_gids_once_the_server_listens() -> Result<()> {
    let pods = Pods::new()?;
    let (code, report) = pods.verify("", &["--only", "ping,rping,write-bw"])?;
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(
        verdicts(&report),
        [
            "ping net1 pass",
            "ping net2 pass",
            "rping net1 pass",
            "rping net2 pass",
            "write-bw net1 pass",
            "write-bw net2 pass",
        ]
    );
    let log = pods.log()?;
    let bandwidth = |pod: &str, device: &str, gid: &str, address: &str| {
        let of = |line: &&String| {
            line.starts_with(&format!("{pod} ib_write_bw -d {device} -i 1 -x {gid} "))
                && line.ends_with(address)
        };
        log.iter().filter(of).count()
    };
    for (device, server, client, address) in [
        ("mlx5_0", "13", "11", "10.0.1.1"),
        ("mlx5_1", "21", "19", "10.0.2.1"),
    ] {
        assert_eq!(bandwidth("server", device, server, ""), 1, "{log:#?}");
        assert_eq!(
            bandwidth("client", device, client, address),
            2,
            "came too early once: {log:#?}"
        );
    }
    let ports: std::collections::BTreeSet<&str> = log
        .iter()
        .filter(|line| line.starts_with("server "))
        .filter_map(|line| line.split(" -p ").nth(1)?.split(' ').next())
        .collect();
    assert_eq!(ports.len(), 4, "each run has a port of its own: {log:#?}");
    let measured = report["measurements"].as_array().context("measurements")?;
    assert_eq!(measured.len(), 2, "{report}");
    Ok(())
}

fn a_rail_that_fails_a_step_is_left_out_of_the_next() -> Result<()> {
    let pods = Pods::new()?;
    let (code, report) =
        pods.verify("ping:net1 mr:net2-gpu", &["--gpu", "0", "--skip", "rping"])?;
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(
        verdicts(&report),
        [
            "ping net1 fail",
            "ping net2 pass",
            "write-bw net1 notApplicable",
            "write-bw net2 pass",
            "gpu net1 notApplicable",
            "gpu net2 fail",
        ]
    );
    assert!(
        !pods
            .log()?
            .iter()
            .any(|line| line.contains("ib_write_bw -d mlx5_0"))
    );
    let registration = finding(&report, "gpu", "net2")?;
    assert!(
        word(&registration["why"]).contains("memlock"),
        "{registration}"
    );
    assert!(
        word(&registration["remedy"]).contains("IPC_LOCK"),
        "{registration}"
    );
    assert!(
        registration.to_string().contains("Couldn't allocate MR"),
        "{registration}"
    );
    Ok(())
}

fn the_connection_manager_is_reported_and_carries_nothing() -> Result<()> {
    let pods = Pods::new()?;
    let (code, report) = pods.verify("rping:net1", &["--only", "rping,write-bw"])?;
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(
        verdicts(&report),
        [
            "rping net1 fail",
            "rping net2 pass",
            "write-bw net1 pass",
            "write-bw net2 pass"
        ]
    );
    let refused = finding(&report, "rping", "net1")?;
    assert!(
        word(&refused["remedy"]).contains("UDP port 4791"),
        "{refused}"
    );
    Ok(())
}

fn a_path_that_drops_large_packets_is_a_warning() -> Result<()> {
    let pods = Pods::new()?;
    let only = ["--only", "ping,write-bw", "--interface", "net2"];
    let (code, report) = pods.verify("large:net2", &only)?;
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(verdicts(&report), ["ping net2 warn", "write-bw net2 pass"]);
    assert!(
        word(&finding(&report, "ping", "net2")?["why"]).contains("9000 bytes"),
        "{report}"
    );
    assert!(
        pods.log()?
            .iter()
            .any(|line| line.contains("-M do -s 8972 10.0.2.1"))
    );
    let (code, report) = pods.verify("large:net2", &[&only[..], &["--strict"]].concat())?;
    assert_eq!(code, Some(1), "{report}");
    Ok(())
}

fn a_step_that_is_not_there_is_wrong_usage() -> Result<()> {
    for wrong in [
        &["pod:a", "pod:b", "--only", "pign"][..],
        &["pod:a", "pod:b", "--skip", "ping,write"],
        &["pod:a", "somewhere"],
        &["pod:a", "ssh:b"],
        &["pid:1", "pod:b"],
        &["--read", "/dev/null"],
        &["pod:a"],
    ] {
        let output = plugin(&["verify"])?.args(wrong).output()?;
        assert_eq!(
            output.status.code(),
            Some(2),
            "{wrong:?}: {}",
            said(&output)
        );
    }
    Ok(())
}
