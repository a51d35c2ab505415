//! `rdma-device-plugin status`: how the daemon on this node is doing, as it says itself.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, bail};
use comfy_table::{ContentArrangement, Table, presets};
use serde_json::Value;

/// How long the daemon may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// Thousands of units are far below this.
const MOST_BYTES: u64 = 64 << 20;

/// Asks the daemon how it is doing.
#[derive(Debug, clap::Args)]
pub struct Status {
    /// Where the daemon serves metrics
    #[arg(long, value_name = "ADDRESS:PORT", env = "RDMA_METRICS_ADDR")]
    metrics_addr: Option<SocketAddr>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Status {
    /// Asks and prints.
    ///
    /// # Errors
    /// No daemon answers.
    pub fn run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let Some(address) = self.metrics_addr else {
            bail!(
                "where does the daemon serve metrics? give --metrics-addr, or set \
                 RDMA_METRICS_ADDR for both"
            );
        };
        let text = ask(address).with_context(|| format!("ask the daemon at {address}"))?;
        let document: Value = serde_json::from_str(&text).context("read the daemon's answer")?;
        if self.json {
            return writeln!(out, "{document:#}").context("print");
        }
        print(&document, out)
    }
}

/// One question over HTTP/1.0, which ends with the answer.
fn ask(address: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET /status HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.take(MOST_BYTES).read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("not an HTTP answer")?;
    if head.split(' ').nth(1) != Some("200") {
        bail!("it answered {:?}", head.lines().next().unwrap_or_default());
    }
    Ok(body.to_owned())
}

fn print(document: &Value, out: &mut impl Write) -> anyhow::Result<()> {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".into(),
        other => other.to_string(),
    };
    let at = |value: &Value, path: &str| value.pointer(path).map_or("-".into(), text);
    let list = |value: &Value| {
        let words: Vec<String> = value.as_array().into_iter().flatten().map(&text).collect();
        if words.is_empty() {
            "-".into()
        } else {
            words.join(" ")
        }
    };
    writeln!(
        out,
        "version {}, up {} s, configuration {} (generation {}), netns mode {}",
        text(&document["version"]),
        text(&document["uptimeSeconds"]),
        at(document, "/configuration/file"),
        at(document, "/configuration/generation"),
        text(&document["netnsMode"]),
    )?;
    let pools = || document["pools"].as_array().into_iter().flatten();
    let mut units = new_table(["RESOURCE", "HEALTHY", "UNHEALTHY", "HELD", "KUBELET"]);
    let mut hcas = new_table(["RESOURCE", "HCA", "DEVICE", "NETDEV", "NUMA", "HEALTH"]);
    for pool in pools() {
        let kubelet = match (pool["registered"].as_bool(), pool["streaming"].as_bool()) {
            (Some(true), Some(true)) => "listening".into(),
            (Some(true), _) => "registered".into(),
            _ => format!("not registered: {}", text(&pool["lastError"])),
        };
        units.add_row([
            text(&pool["resource"]),
            at(pool, "/units/healthy"),
            at(pool, "/units/unhealthy"),
            pool["held"]
                .as_array()
                .map_or("?".into(), |held| held.len().to_string()),
            kubelet,
        ]);
        for hca in pool["hcas"].as_array().into_iter().flatten() {
            let health = match &hca["reason"] {
                Value::String(reason) => reason.clone(),
                _ => "healthy".into(),
            };
            hcas.add_row([
                text(&pool["resource"]),
                text(&hca["id"]),
                list(&hca["rdmaDevices"]),
                list(&hca["netdevs"]),
                text(&hca["numaNode"]),
                health,
            ]);
        }
    }
    writeln!(out, "\n{}\n\n{}", units.trim_fmt(), hcas.trim_fmt())?;
    let mut held = new_table(["RESOURCE", "UNIT", "POD", "CONTAINER"]);
    for pool in pools() {
        for one in pool["held"].as_array().into_iter().flatten() {
            let pod = format!("{}/{}", text(&one["namespace"]), text(&one["pod"]));
            held.add_row([
                text(&pool["resource"]),
                text(&one["unit"]),
                pod,
                text(&one["container"]),
            ]);
        }
    }
    if held.row_count() > 0 {
        writeln!(out, "\n{}", held.trim_fmt())?;
    }
    let told = ["unready", "notes"].map(|key| document[key].as_array().into_iter().flatten());
    for note in told.into_iter().flatten() {
        writeln!(out, "{}", text(note))?;
    }
    Ok(())
}

fn new_table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    table
}
