//! What README and docs say is so: their examples are read by the programs they are for, no key is
//! missing, messages are the programs' own, commands and links lead somewhere.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::bin_under_test::product;
use e2e::case;
use e2e::cni::Call;
use e2e::harness::Case;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const CASES: &[Case] = &[
    case!(every_example_is_read_by_its_program, Root),
    case!(every_key_of_a_pool_is_explained),
    case!(every_key_of_an_ipam_is_explained, Root),
    case!(the_versions_that_are_spoken_are_named),
    case!(every_message_is_one_that_a_program_prints),
    case!(every_command_is_there),
    case!(every_link_leads_somewhere),
    case!(every_error_code_is_explained),
    case!(every_alert_has_a_run_book),
    case!(the_dashboard_has_the_agents_metrics_and_few_lines),
    case!(no_page_is_longer_than_its_limit),
    case!(the_picture_is_that_of_its_text),
];

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_owned)
        .unwrap_or_default()
}

/// README and everything in docs/, by path from the top.
fn pages() -> Result<Vec<(PathBuf, String)>> {
    let mut paths = vec![PathBuf::from("README.md")];
    for entry in fs::read_dir(top().join("docs"))? {
        let name = entry?.file_name();
        if Path::new(&name).extension().is_some_and(|end| end == "md") {
            paths.push(Path::new("docs").join(name));
        }
    }
    let read = |path: PathBuf| {
        let text =
            fs::read_to_string(top().join(&path)).with_context(|| path.display().to_string())?;
        Ok((path, text))
    };
    paths.into_iter().map(read).collect()
}

fn page() -> Result<String> {
    Ok(fs::read_to_string(top().join("docs/reference.md"))?)
}

/// The fenced blocks of a page, each with its language.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let fenced = page.split("\n```").skip(1).step_by(2);
    fenced.filter_map(|block| block.split_once('\n')).collect()
}

fn ended(program: &str, arguments: &[&str]) -> Result<std::result::Result<(), String>> {
    let output = Command::new(product(program)?).args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(output.status.success().then_some(()).ok_or(said))
}

/// A node of its own, as far as STATUS reads.
fn status(network: &Value, at: &TempDir) -> Result<std::result::Result<(), String>> {
    let policy = at.path().join("policy.json");
    let text = json!({"stateDir": at.path().join("state")});
    fs::write(&policy, text.to_string())?;
    let mut network = network.clone();
    // The command that reads a configuration and touches nothing is as young as that.
    network["cniVersion"] = json!("1.1.0");
    // A netdev of the example's node.
    if let Some(keys) = network.as_object_mut() {
        keys.remove("master");
    }
    let plugin = product(network["type"].as_str().context("no type")?)?;
    let call = Call::new(&plugin, "x", Path::new(""), "x").env("RDMA_NETDEV_POLICY", &policy);
    let answer = call.run("STATUS", network.to_string().as_bytes())?;
    Ok(answer.status.success().then_some(()).ok_or(answer.stdout))
}

/// What asks a program about an example, and which kind of example it is.
fn ask(language: &str, text: &str) -> Result<(usize, std::result::Result<(), String>)> {
    let at = tempfile::tempdir()?;
    let file = at.path().join("example");
    fs::write(&file, text)?;
    let name = file.to_str().context("path")?;
    let document: Option<Value> = match language {
        "yaml" => serde_saphyr::from_str(text).ok(),
        _ => serde_json::from_str(text).ok(),
    };
    let has = |key: &str| document.as_ref().is_some_and(|d| d.get(key).is_some());
    let network = document.as_ref().and_then(|d| match d["kind"].as_str() {
        Some("NetworkAttachmentDefinition") => {
            serde_json::from_str(d["spec"]["config"].as_str()?).ok()
        }
        _ => has("cniVersion").then(|| d.clone()),
    });
    if has("pools") || has("configList") || has("resourceList") {
        return Ok((0, ended("rdmactl", &["validate", name])?));
    }
    if let Some(network) = network {
        return Ok((1, networks(&network, &at)?));
    }
    if ["stores", "rails", "allow"].into_iter().any(has) {
        fs::create_dir(at.path().join("etc"))?;
        fs::create_dir(at.path().join("bin"))?;
        let given = format!("--policy={name}");
        let to = format!("--policy-to={}/etc/policy.json", at.path().display());
        let bin = format!("--to={}/bin", at.path().display());
        return Ok((
            2,
            ended("rdma-device-plugin", &["install", &given, &to, &bin])?,
        ));
    }
    // A part of a Pod; manifests/examples has whole ones.
    ensure!(has("spec"), "an example that no program reads:\n{text}");
    Ok((3, Ok(())))
}

/// Each plugin of a network that is ours.
fn networks(network: &Value, at: &TempDir) -> Result<std::result::Result<(), String>> {
    let one = [network.clone()];
    let plugins = network["plugins"]
        .as_array()
        .map_or(&one[..], Vec::as_slice);
    let mut ours = 0;
    for plugin in plugins {
        if !plugin["type"]
            .as_str()
            .is_some_and(|kind| kind.starts_with("rdma-"))
        {
            continue;
        }
        let mut plugin = plugin.clone();
        plugin["name"] = network["name"].clone();
        // The mode of the machine that runs this is its own affair.
        if plugin["rdma"] == "required" {
            plugin["rdma"] = json!("auto");
        }
        if let Err(said) = status(&plugin, at)? {
            return Ok(Err(said));
        }
        ours += 1;
    }
    ensure!(ours > 0, "no plugin of ours in {network}");
    Ok(Ok(()))
}

fn every_example_is_read_by_its_program() -> Result<()> {
    let mut read = [0; 4];
    for (path, page) in pages()? {
        for (language, text) in blocks(&page) {
            if language != "json" && language != "yaml" {
                continue;
            }
            let asked = ask(language, text).with_context(|| path.display().to_string());
            let (which, outcome) = asked?;
            if let Err(said) = outcome {
                bail!("{said}\nof the example in {}\n{text}", path.display());
            }
            read[which] += 1;
        }
    }
    ensure!(
        read.iter().all(|count| *count > 0),
        "examples of each kind: {read:?}"
    );
    ensure!(read[1] >= 8, "networks before and after: {read:?}");
    Ok(())
}

/// All string literals of the programs' sources, run together, with what varies as `{}`.
fn literals() -> Result<String> {
    let mut text = String::new();
    let mut directories: Vec<PathBuf> = [
        "cni-plugin/src",
        "cni-plugin/attachment/src",
        "cni-plugin/netlink/src",
        "ipam/src",
        "agent/src",
        "node/src",
        "node/server/src",
        "proto/cni/src",
        "proto/node/src",
        "hca/src",
        "proto/kubelet/src",
        "device-plugin/src",
        "device-plugin/pools/src",
        "admin/src",
    ]
    .map(|d| top().join(d))
    .into();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                text.push_str(&fs::read_to_string(path)?);
            }
        }
    }
    // A backslash at the end of a line joins a literal with its next line.
    let joined: String = text
        .split("\\\n")
        .enumerate()
        .map(|(number, part)| if number == 0 { part } else { part.trim_start() })
        .collect();
    Ok(joined.replace("\\\"", "\""))
}

/// A reader who searches for a message must find it as the program prints it.
fn every_message_is_one_that_a_program_prints() -> Result<()> {
    let page = fs::read_to_string(top().join("docs/troubleshooting.md"))?;
    let sources = literals()?;
    let (mut messages, mut unknown) = (0, Vec::new());
    let mut ours = false;
    for line in page.lines() {
        if !line.starts_with('|') {
            ours = false;
            continue;
        }
        let Some(first) = line.split('|').nth(1) else {
            continue;
        };
        match first.trim() {
            "message" => ours = true,
            _ if !ours || first.contains("---") => {}
            cell => {
                for message in cell.split('`').skip(1).step_by(2) {
                    let parts = message
                        .split('…')
                        .map(|part| part.trim_matches([' ', ':', ',', '(', ')']));
                    for part in parts.filter(|part| part.len() > 5) {
                        if !sources.contains(part) {
                            unknown.push(format!("{part:?} of {line}"));
                        }
                    }
                    messages += 1;
                }
            }
        }
    }
    ensure!(
        unknown.is_empty(),
        "no program says\n{}",
        unknown.join("\n")
    );
    ensure!(messages > 24, "only {messages} messages");
    Ok(())
}

fn no_page_is_longer_than_its_limit() -> Result<()> {
    let mut all = 0;
    for (path, page) in pages()? {
        let limit = match path.to_str() {
            Some("README.md") => 900,
            Some("docs/install.md") => 1750,
            Some("docs/reference.md") => 1700,
            _ => 1250,
        };
        let has_text = |word: &&str| word.chars().any(char::is_alphanumeric);
        let words = page.split_whitespace().filter(has_text).count();
        ensure!(
            words <= limit,
            "{}: {words} words, not {limit}",
            path.display()
        );
        all += words;
    }
    ensure!(all <= 18_000, "{all} words");
    Ok(())
}

fn the_picture_is_that_of_its_text() -> Result<()> {
    let read = |name| fs::read_to_string(top().join("docs").join(name));
    let (text, picture) = (read("programs.dot")?, read("programs.svg")?);
    let picture = picture.replace("&#45;", "-").replace("&#160;", " ");
    let drawn = picture.split("</text>").filter_map(|t| t.rsplit_once('>'));
    let drawn: BTreeSet<&str> = drawn.map(|(_, word)| word.trim()).collect();
    let labels = text.split("label=\"").skip(1);
    let labels = labels.filter_map(|rest| Some(rest.split_once('"')?.0));
    let labels: BTreeSet<&str> = labels.flat_map(|l| l.split("\\n")).map(str::trim).collect();
    let lost: Vec<_> = labels.difference(&drawn).collect();
    ensure!(lost.is_empty(), "make picture: {lost:?} are not drawn");
    Ok(())
}

fn every_command_is_there() -> Result<()> {
    let makefile = fs::read_to_string(top().join("Makefile"))?;
    let mut seen = BTreeSet::new();
    let pages = pages()?;
    for (path, page) in &pages {
        for (language, text) in blocks(page) {
            if !language.is_empty() && language != "text" {
                continue;
            }
            for line in text.lines() {
                let line = line.split(" #").next().unwrap_or_default().trim();
                let words: Vec<&str> = line.split_whitespace().collect();
                let at = || format!("{}: {line}", path.display());
                match words.as_slice() {
                    ["make", target, ..] => {
                        let found = makefile
                            .lines()
                            .any(|l| l.starts_with(&format!("{target}:")));
                        ensure!(
                            found || makefile.contains(&format!(" {target}: ")),
                            "no target: {}",
                            at()
                        );
                        seen.insert("make");
                    }
                    ["kubectl", "apply" | "delete", "-k", directory, ..] => {
                        let file = top().join(directory).join("kustomization.yaml");
                        ensure!(file.is_file(), "no kustomization: {}", at());
                        seen.insert("kubectl");
                    }
                    [
                        program @ ("rdma-device-plugin" | "rdma-agent" | "rdmactl"),
                        rest @ ..,
                    ] => {
                        command_is_there(program, program, rest).with_context(at)?;
                        seen.insert(*program);
                    }
                    ["kubectl", "rdma", rest @ ..] => {
                        command_is_there("rdmactl", "kubectl-rdma", rest).with_context(at)?;
                        seen.insert("kubectl rdma");
                    }
                    _ => {}
                }
            }
        }
    }
    ensure!(seen.len() == 6, "only {seen:?}");
    Ok(())
}

/// The sub-command has a help, and the help has each flag.
fn command_is_there(program: &str, called: &str, rest: &[&str]) -> Result<()> {
    let commands: Vec<&&str> = rest
        .iter()
        .take_while(|word| {
            word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with('-')
        })
        .collect();
    // Of "addresses export FILE" two words, of "verify pod:a pod:b" one.
    let output = Command::new(product(program)?)
        .arg0(called)
        .args(&commands)
        .arg("--help")
        .output()?;
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for flag in rest.iter().filter(|word| word.starts_with("--")) {
        let name = flag.split('=').next().unwrap_or_default();
        ensure!(help.contains(name), "{called} has no {name}");
    }
    Ok(())
}

/// As GitHub makes anchors of headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let text = line.trim_start_matches('#').trim().to_lowercase();
            let kept = text
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

fn every_link_leads_somewhere() -> Result<()> {
    let mut links = 0;
    for (path, page) in pages()? {
        for rest in page.split("](").skip(1) {
            let target = rest.split(')').next().unwrap_or_default();
            if target.starts_with("http") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let there = match file {
                "" => top().join(&path),
                _ => top().join(&path).parent().context("a folder")?.join(file),
            };
            ensure!(there.exists(), "{}: nothing at {target}", path.display());
            if !anchor.is_empty() {
                let known = anchors(&fs::read_to_string(&there)?);
                ensure!(
                    known.contains(anchor),
                    "{}: no heading {target}",
                    path.display()
                );
            }
            links += 1;
        }
    }
    ensure!(links > 20, "only {links} links");
    Ok(())
}

fn every_error_code_is_explained() -> Result<()> {
    let source = fs::read_to_string(top().join("proto/cni/src/error.rs"))?;
    let page = fs::read_to_string(top().join("docs/troubleshooting.md"))?;
    let (_, table) = page.split_once("## Error codes").context("no section")?;
    let explained: BTreeSet<u32> = table
        .lines()
        .filter_map(|line| line.split('|').nth(1))
        .flat_map(|cell| cell.split(',').filter_map(|code| code.trim().parse().ok()))
        .collect();
    let codes = source.split("Code = Code(").skip(1);
    let codes = codes.filter_map(|part| part.split(')').next()?.parse::<u32>().ok());
    let codes: BTreeSet<u32> = codes.collect();
    ensure!(codes.len() > 10, "{codes:?}");
    let missing: Vec<_> = codes.difference(&explained).collect();
    ensure!(
        missing.is_empty(),
        "not in docs/troubleshooting.md: {missing:?}"
    );
    Ok(())
}

/// The keys that a refusal of an unknown one lists, and that the page does not have.
fn missing(refusal: &str, page: &str) -> Result<Vec<String>> {
    let (_, list) = refusal
        .split_once("known keys: ")
        .with_context(|| refusal.to_owned())?;
    let list = list.lines().next().unwrap_or_default();
    let keys = list.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let keys = keys
        .take_while(|key| *key != "n")
        .filter(|key| !key.is_empty());
    let explained =
        |key: &str| page.contains(&format!("{key}`")) || page.contains(&format!("`{key}"));
    Ok(keys
        .filter(|key| !explained(key))
        .map(str::to_owned)
        .collect())
}

fn every_key_of_a_pool_is_explained() -> Result<()> {
    let page = page()?;
    let pool =
        |key: &str| format!("version: 1\npools:\n- resource: a/b\n  mode: shared\n  {key}\n");
    let texts = [
        "version: 1\npools: []\nqqqqqqqqqqqq: 1\n".to_owned(),
        pool("qqqqqqqqqqqq: 1"),
        pool("nodes: {qqqqqqqqqqqq: 1}"),
        pool("select: {qqqqqqqqqqqq: 1}"),
    ];
    let at = tempfile::tempdir()?;
    let file = at.path().join("config");
    for text in texts {
        fs::write(&file, &text)?;
        let name = file.to_str().context("path")?;
        let Err(said) = ended("rdmactl", &["validate", name])? else {
            bail!("accepted:\n{text}");
        };
        let missing = missing(&said, &page)?;
        ensure!(missing.is_empty(), "not in docs/reference.md: {missing:?}");
    }
    Ok(())
}

fn every_key_of_an_ipam_is_explained() -> Result<()> {
    let page = page()?;
    let ipam = json!({"type": "rdma-ipam", "range": "10.0.0.0/24", "qqqqqqqqqqqq": 1});
    let network = json!({"name": "a", "type": "rdma-ipam", "ipam": ipam});
    let Err(said) = status(&network, &tempfile::tempdir()?)? else {
        bail!("an unknown key was accepted");
    };
    let missing = missing(&said, &page)?;
    ensure!(missing.is_empty(), "not in docs/reference.md: {missing:?}");
    Ok(())
}

fn the_versions_that_are_spoken_are_named() -> Result<()> {
    let mut command = Command::new(product("rdma-netdev")?);
    let output = command.env_clear().env("CNI_COMMAND", "VERSION").output()?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    let versions = document["supportedVersions"].as_array();
    let versions = versions.context("no list of versions")?;
    let text = |version: Option<&Value>| version.and_then(Value::as_str).map(str::to_owned);
    let oldest = text(versions.first()).context("no version")?;
    let newest = text(versions.last()).context("no version")?;
    let sentence = format!("Versions {oldest} to {newest} of the CNI specification are supported");
    let page = fs::read_to_string(top().join("docs/networks.md"))?;
    ensure!(
        page.contains(&sentence),
        "docs/networks.md does not say: {sentence}"
    );
    Ok(())
}

/// The agent's metrics that `query` asks for and `page` does not name.
fn undocumented_of_agent(query: &str, page: &str) -> Vec<String> {
    let names = query.split("rdma_agent_").skip(1).map(|metric| {
        let end = metric.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        format!("`rdma_agent_{}`", &metric[..end.unwrap_or(metric.len())])
    });
    names.filter(|name| !page.contains(name)).collect()
}

/// The agent alone tells what a node owns of subnets that nodes share; and no query makes a line of
/// each of hundreds of nodes.
fn the_dashboard_has_the_agents_metrics_and_few_lines() -> Result<()> {
    let page = fs::read_to_string(top().join("docs/metrics.md"))?;
    let text = fs::read_to_string(top().join("manifests/chart/files/dashboard.json"))?;
    let unknown = undocumented_of_agent(&text, &page);
    ensure!(unknown.is_empty(), "{unknown:?}");
    let dashboard: Value = serde_json::from_str(&text)?;
    let mut of_agent = 0;
    for panel in dashboard["panels"].as_array().context("panels")? {
        for target in panel["targets"].as_array().context("targets")? {
            let query = target["expr"].as_str().context("a query")?;
            of_agent += usize::from(query.contains("rdma_agent_"));
            let drawn = panel["type"] == "timeseries" && query.contains("by (node");
            ensure!(
                !drawn
                    || query.ends_with("> 0")
                    || query.contains("topk")
                    || query.contains("bottomk"),
                "{}: a line for each node: {query}",
                panel["title"]
            );
        }
    }
    ensure!(of_agent > 3, "{of_agent} queries of the agent");
    Ok(())
}

fn every_alert_has_a_run_book() -> Result<()> {
    let rules = fs::read_to_string(top().join("manifests/chart/files/rules.yaml"))?;
    let rules: Value = serde_saphyr::from_str(&rules)?;
    let page = fs::read_to_string(top().join("docs/alerts.md"))?;
    let headings: BTreeSet<&str> = page.lines().filter_map(|l| l.strip_prefix("## ")).collect();
    let metrics = fs::read_to_string(top().join("docs/metrics.md"))?;
    let mut alerts = 0;
    for group in rules["spec"]["groups"].as_array().context("groups")? {
        for rule in group["rules"].as_array().context("rules")? {
            let name = rule["alert"].as_str().context("a name")?;
            ensure!(headings.contains(name), "docs/alerts.md has no ## {name}");
            let link = rule["annotations"]["runbook_url"]
                .as_str()
                .context("a link")?;
            let expected = format!("docs/alerts.md#{}", name.to_lowercase());
            assert_eq!(link, expected);
            let unknown =
                undocumented_of_agent(rule["expr"].as_str().context("an expression")?, &metrics);
            ensure!(unknown.is_empty(), "{name}: {unknown:?}");
            alerts += 1;
        }
    }
    assert_eq!(headings.len(), alerts, "an alert that there is not");
    Ok(())
}
