//! The rungs, from the ends' devices up to NCCL, for each pair of ports.
//!
//! A pair that fails a rung is not tried on the next: what stands on a broken rung fails with a
//! message that misleads. Only `rping` carries nothing: `ib_write_bw` connects without `rdma_cm`.
//! Nothing is left running: each tool is run by `timeout` where it runs.

use std::future::Future;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use crate::verdict::{Finding, Outcome, Verdict};

use super::ends::{self, End, Port};
use super::judge::{self, Fabric, Memory};
use super::place::{Ended, Place};
use super::{causes, nccl, perftest, ping};

/// One rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rung {
    /// Its name.
    pub id: &'static str,
    /// What should be so.
    pub title: &'static str,
}

/// Devices, ports, addresses.
pub(super) const ENDS: Rung = Rung {
    id: "ends",
    title: "both ends have an RDMA device, a port and an address",
};
/// IP packets.
pub(super) const PING: Rung = Rung {
    id: "ping",
    title: "packets go over the network's interface",
};
/// `rdma_cm`.
pub(super) const RPING: Rung = Rung {
    id: "rping",
    title: "the RDMA connection manager connects",
};
/// Bandwidth between host memories.
pub(super) const WRITE_BW: Rung = Rung {
    id: "write-bw",
    title: "ib_write_bw reaches the line rate",
};
/// Bandwidth between GPU memories.
pub(super) const GPU: Rung = Rung {
    id: "gpu",
    title: "ib_write_bw reaches it between GPUs' memory",
};
/// The whole job.
pub(super) const NCCL: Rung = Rung {
    id: "nccl",
    title: "a collective of NCCL reaches it",
};
/// What may be chosen, lowest first.
pub(super) const CHOICE: [Rung; 5] = [PING, RPING, WRITE_BW, GPU, NCCL];

/// What is to be verified.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// Where servers run.
    pub server: Place,
    /// Where clients run.
    pub client: Place,
    /// The program that stands for kubectl.
    pub kubectl: String,
    /// Only this netdev of each end.
    pub interface: Option<String>,
    /// Only this RDMA device of each end.
    pub device: Option<String>,
    /// Gb/s, where the ports' own rate is not what counts.
    pub line: Option<f64>,
    /// Rungs to climb; `ends` always is.
    pub rungs: Vec<&'static str>,
    /// GPU at both ends, as perftest counts them.
    pub gpu: Option<u32>,
    /// By dma-buf, not by `nvidia_peermem`.
    pub dmabuf: bool,
    /// The shell command that runs `nccl-tests`, at the client.
    pub nccl: Option<String>,
    /// NICs of each pod, for NCCL's limit.
    pub nics: Option<u32>,
    /// How long one tool may take.
    pub command_timeout: Duration,
    /// First TCP port of the tools; each run takes the next.
    pub port: u16,
}

/// Numbers that a tool printed.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Measurement {
    /// The rung.
    pub rung: &'static str,
    /// The pair of ports, or `None` for a whole job.
    pub object: Option<String>,
    /// The lines of its table.
    pub rows: Value,
}

/// What was found.
#[derive(Debug, Clone, Default)]
pub(super) struct Climbed {
    /// Each rung.
    pub outcomes: Vec<Outcome>,
    /// What was measured.
    pub measurements: Vec<Measurement>,
}

/// Why a rung says nothing; somebody who knows that ping is filtered leaves that out.
const NOT_TRIED: &str = "not tried: a rung below it failed, which --skip would leave out";
/// The same where there is no pair of ports: the ends themselves cannot be left out.
const NO_PAIR: &str = "not tried: there is no pair of ports, see the ends";
/// How long a server may take to listen, at least; half of what it may take at all, where that is
/// more: a busy API server starts a command in a pod in its own time.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two tries of a client.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// What clients say while the server does not listen yet.
const REFUSED: [&str; 5] = [
    "Couldn't connect",
    "Connection refused",
    "Unable to connect",
    "RDMA_CM_EVENT_REJECTED",
    "Failed to connect",
];

struct Climb<'a> {
    plan: &'a Plan,
    next_port: u16,
    climbed: Climbed,
}

/// Between two lines that say that a tool still runs.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Does some work, and says what it is, and how long it has taken, until it is done.
async fn reported<T>(progress: &dyn Fn(&str), what: &str, work: impl Future<Output = T>) -> T {
    progress(what);
    let started = Instant::now();
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = tokio::time::sleep(PROGRESS_INTERVAL) => {
                progress(&format!("{what}, for {} s", started.elapsed().as_secs()));
            }
        }
    }
}

/// Climbs; `progress` is called with what is done now, when it starts and every ten seconds.
pub(super) async fn climb(plan: &Plan, progress: &dyn Fn(&str)) -> Climbed {
    let mut climb = Climb {
        plan,
        next_port: plan.port,
        climbed: Climbed::default(),
    };
    let both = async { tokio::join!(probe(plan, &plan.server), probe(plan, &plan.client)) };
    let what = format!("{}: {} and {}", ENDS.id, plan.server, plan.client);
    let (server, client) = reported(progress, &what, both).await;
    let mut findings = vec![end(&plan.server, &server), end(&plan.client, &client)];
    let (server, client) = (server.unwrap_or_default(), client.unwrap_or_default());
    let pairs = ends::pairs(&server, &client);
    if pairs.is_empty() && findings.iter().all(|f| f.verdict == Verdict::Pass) {
        findings.push(Finding::fail(
            "no port of one end belongs to one of the other",
            "give --interface or --device",
        ));
    }
    climb.outcome(ENDS, findings);
    let mut standing: Vec<(&Port, &Port)> = pairs;
    let mut broken: Vec<String> = Vec::new();
    for rung in CHOICE {
        if !plan.rungs.contains(&rung.id) {
            continue;
        }
        let mut findings: Vec<Finding> = broken
            .iter()
            .map(|object| Finding::not_applicable(NOT_TRIED).on(object))
            .collect();
        if rung == NCCL {
            if broken.is_empty() && !standing.is_empty() {
                let what = format!("{}: the command given by --nccl runs", NCCL.id);
                let work = climb.collective();
                findings.push(reported(progress, &what, work).await);
            }
        } else {
            let mut still = Vec::new();
            for (ours, theirs) in standing {
                let object = object(ours, theirs);
                let work = async {
                    match rung {
                        PING => climb.ping(ours, theirs).await,
                        RPING => climb.rping(&server, &client, ours).await,
                        WRITE_BW => climb.write_bw(&server, ours, theirs, None).await,
                        _ => match plan.gpu {
                            Some(gpu) => climb.write_bw(&server, ours, theirs, Some(gpu)).await,
                            None => Finding::not_applicable("no GPU was named (--gpu)"),
                        },
                    }
                };
                let finding = if rung == GPU && plan.gpu.is_none() {
                    work.await
                } else {
                    reported(progress, &format!("{}: {object}", rung.id), work).await
                };
                if finding.verdict == Verdict::Fail && rung != RPING {
                    broken.push(object.clone());
                } else {
                    still.push((ours, theirs));
                }
                findings.push(finding.on(object));
            }
            standing = still;
        }
        if findings.is_empty() {
            findings.push(Finding::not_applicable(NO_PAIR));
        }
        climb.outcome(rung, findings);
    }
    climb.climbed
}

fn object(server: &Port, client: &Port) -> String {
    let (server, client) = (server.name(), client.name());
    if server == client {
        server
    } else {
        format!("{server} and {client}")
    }
}

async fn probe(plan: &Plan, place: &Place) -> Result<End, String> {
    let ended = place
        .run(
            &plan.kubectl,
            &["sh", "-c", ends::PROBE],
            plan.command_timeout,
        )
        .await?;
    if !ended.fine {
        return Err(ended.last().to_owned());
    }
    Ok(ends::read(
        &ended.text,
        plan.interface.as_deref(),
        plan.device.as_deref(),
    ))
}

fn end(place: &Place, end: &Result<End, String>) -> Finding {
    let finding = match end {
        Err(error) => Finding::fail(format!("it could not be probed: {error}"), place.remedy()),
        Ok(end) if end.ports.is_empty() => {
            let mut why = "no port can be tested".to_owned();
            for left in &end.left {
                why.push_str("; ");
                why.push_str(left);
            }
            Finding::fail(
                why,
                "the container must ask for the resource, and the pod for the network; see \
                 \"rdmactl status\" and discover on its node",
            )
        }
        Ok(end) => {
            let names: Vec<String> = end.ports.iter().map(Port::name).collect();
            Finding::pass(names.join(", "))
        }
    };
    let finding = finding.on(place.to_string());
    let Ok(end) = end else { return finding };
    end.ports.iter().fold(finding, |finding, port| {
        let mut facts = Vec::new();
        facts.extend(port.address.map(|address| address.to_string()));
        facts.extend(port.gid_index.map(|index| format!("GID index {index}")));
        facts.extend(port.mtu.map(|mtu| format!("MTU {mtu}")));
        facts.extend(port.rate.map(|rate| format!("{rate} Gb/s")));
        finding.read(port.name(), facts.join(", "))
    })
}

impl Climb<'_> {
    fn outcome(&mut self, rung: Rung, findings: Vec<Finding>) {
        let worst = findings.iter().map(|finding| finding.verdict).max();
        self.climbed.outcomes.push(Outcome {
            id: rung.id,
            title: rung.title,
            verdict: worst.unwrap_or(Verdict::NotApplicable),
            findings,
        });
    }

    async fn ping(&self, server: &Port, client: &Port) -> Finding {
        let (Some(address), Some(netdev)) = (server.address, &client.netdev) else {
            return Finding::not_applicable("the port has no IP address");
        };
        let address = address.to_string();
        let ping = |more: Vec<String>| {
            let mut argv: Vec<String> = ["ping", "-W", "2", "-I", netdev].map(str::to_owned).into();
            argv.extend(more);
            argv.push(address.clone());
            async move { self.run(&self.plan.client, &argv).await }
        };
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        let ended = ping(words(&["-c", "3"])).await;
        let Some(echoes) = ping::read(&ended.text) else {
            return unanswered(&ended, "ping", Verdict::Unknown);
        };
        let average = echoes
            .average
            .map_or(String::new(), |ms| format!(", {ms} ms"));
        let read = format!("{} of {} came back{average}", echoes.received, echoes.sent);
        if echoes.received == 0 {
            return Finding::fail(
                "no packet comes back over this interface",
                "are both ends in one subnet or routed to each other, on one rail, on one VLAN; \
                 is the uplink of a macvlan up; does a filter drop ICMP?",
            )
            .read("ping", read);
        }
        let mtu = server.mtu.min(client.mtu).filter(|&mtu| mtu > 1500);
        if let (Some(mtu), Some(IpAddr::V4(_))) = (mtu, server.address) {
            // RFC 791 and 792: 20 bytes of IPv4, 8 of ICMP.
            let size = (mtu - 28).to_string();
            let large = ping(words(&["-c", "1", "-M", "do", "-s", &size])).await;
            if ping::read(&large.text).is_some_and(|echoes| echoes.received == 0) {
                return Finding::warn(
                    format!("packets of the interface's MTU of {mtu} bytes do not get through"),
                    "raise the MTU of the switch and of the other end, or lower this one: RDMA \
                     sends packets of this size",
                )
                .read("ping", read);
            }
        }
        if echoes.received < echoes.sent {
            return Finding::warn(
                "packets are lost",
                "check the link's error counters (preflight L12)",
            )
            .read("ping", read);
        }
        Finding::pass("packets go there and back").read("ping", read)
    }

    async fn rping(&mut self, server: &End, client: &End, port: &Port) -> Finding {
        let Some(address) = port.address else {
            return Finding::not_applicable("the port has no IP address");
        };
        for (place, end) in [(&self.plan.server, server), (&self.plan.client, client)] {
            if !end.connection_manager {
                return Finding::not_applicable(format!(
                    "{place} has no /dev/infiniband/rdma_cm: only programs that use rdma_cm miss it"
                ));
            }
            if !end.tools.iter().any(|tool| tool == "rping") {
                return Finding::not_applicable(format!("{place} has no rping (rdmacm-utils)"));
            }
        }
        const COUNT: usize = 5;
        let (address, tcp) = (address.to_string(), self.take_port());
        let argv = |end: &str| -> Vec<String> {
            [
                "rping",
                end,
                "-v",
                "-C",
                &COUNT.to_string(),
                "-a",
                &address,
                "-p",
                &tcp,
            ]
            .map(str::to_owned)
            .into()
        };
        let (server, client) = self.both(&argv("-s"), &argv("-c")).await;
        // Its exit status is not 0 when the other end hangs up first.
        let echoes = client.text.matches("ping data: ").count();
        if echoes >= COUNT {
            return Finding::pass("connected, written and read")
                .read("rping", format!("{echoes} echoes"));
        }
        failed(&server, &client, "rping")
    }

    async fn write_bw(
        &mut self,
        server: &End,
        ours: &Port,
        theirs: &Port,
        gpu: Option<u32>,
    ) -> Finding {
        let Some(address) = ours.address.or(server.control) else {
            return Finding::unknown("the server has no address to be reached at");
        };
        let soft = ours.soft || theirs.soft;
        let tcp = self.take_port();
        let argv = |port: &Port| {
            let mut argv = vec!["ib_write_bw".to_owned(), "-d".into(), port.device.clone()];
            argv.extend(["-i".into(), port.port.to_string()]);
            if let Some(index) = port.gid_index {
                argv.extend(["-x".into(), index.to_string()]);
            }
            argv.extend(["-F", "-q", "1", "--report_gbits", "-p", &tcp].map(str::to_owned));
            // All sizes show where a curve is flat; a processor would take hours for them.
            let sizes: &[&str] = if soft {
                &["-s", "65536", "-n", "200"]
            } else {
                &["-a"]
            };
            argv.extend(sizes.iter().map(|&word| word.to_owned()));
            if let Some(gpu) = gpu {
                argv.push(format!("--use_cuda={gpu}"));
                if self.plan.dmabuf {
                    argv.push("--use_cuda_dmabuf".into());
                }
            }
            argv
        };
        let (listening, mut calling) = (argv(ours), argv(theirs));
        calling.push(address.to_string());
        let (server, client) = self.both(&listening, &calling).await;
        let run = perftest::read(&client.text);
        if !client.fine || run.rows.is_empty() {
            return failed(&server, &client, "ib_write_bw");
        }
        let rung = if gpu.is_some() { GPU } else { WRITE_BW };
        self.climbed.measurements.push(Measurement {
            rung: rung.id,
            object: Some(object(ours, theirs)),
            rows: json!(run.rows),
        });
        let slower = match (ours.rate, theirs.rate) {
            (Some(ours), Some(theirs)) => Some(ours.min(theirs)),
            (one, other) => one.or(other),
        };
        let memory = if gpu.is_some() {
            Memory::Gpu
        } else {
            Memory::Host
        };
        judge::bandwidth(&run, self.plan.line.or(slower), soft, memory)
    }

    async fn collective(&mut self) -> Finding {
        let Some(command) = &self.plan.nccl else {
            return Finding::not_applicable("no command that runs nccl-tests was given (--nccl)");
        };
        let argv = ["sh", "-c", command].map(str::to_owned);
        let ended = self.run(&self.plan.client, &argv).await;
        let log = nccl::read(&ended.text);
        if log.rows.is_empty() && !ended.fine {
            return unanswered(&ended, "nccl-tests", Verdict::Fail);
        }
        self.climbed.measurements.push(Measurement {
            rung: NCCL.id,
            object: None,
            rows: json!(log.rows),
        });
        let fabric = Fabric {
            line: self.plan.line,
            nics: self.plan.nics,
        };
        judge::collective(&ended.text, fabric)
    }

    fn take_port(&mut self) -> String {
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(self.plan.port);
        port.to_string()
    }

    async fn run(&self, place: &Place, argv: &[String]) -> Ended {
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let plan = self.plan;
        let ended = place.run(&plan.kubectl, &argv, plan.command_timeout).await;
        ended.unwrap_or_else(|text| Ended { fine: false, text })
    }

    /// Runs a server and a client, the client again until the server listens.
    async fn both(&self, server: &[String], client: &[String]) -> (Ended, Ended) {
        let listening = self.run(&self.plan.server, server);
        let calling = async {
            let started = Instant::now();
            let listen_timeout = LISTEN_TIMEOUT.max(self.plan.command_timeout / 2);
            loop {
                tokio::time::sleep(RETRY_INTERVAL).await;
                let ended = self.run(&self.plan.client, client).await;
                let refused = REFUSED.iter().any(|word| ended.text.contains(word));
                if ended.fine || !refused || started.elapsed() > listen_timeout {
                    return ended;
                }
            }
        };
        tokio::pin!(listening, calling);
        // What the other one may still have to say once the first has ended.
        const OTHER_END_TIMEOUT: Duration = Duration::from_secs(5);
        let late = |what: &str| Ended {
            fine: false,
            text: format!("the {what} was still running"),
        };
        tokio::select! {
            server = &mut listening => {
                let client = tokio::time::timeout(OTHER_END_TIMEOUT, calling).await;
                (server, client.unwrap_or_else(|_| late("client")))
            }
            client = &mut calling => {
                let server = tokio::time::timeout(OTHER_END_TIMEOUT, listening).await;
                (server.unwrap_or_else(|_| late("server")), client)
            }
        }
    }
}

/// A tool failed at one of the ends or both.
fn failed(server: &Ended, client: &Ended, tool: &str) -> Finding {
    let text = format!("{}\n{}", client.text, server.text);
    let (why, remedy) = meaning(&text, tool);
    Finding::fail(why, remedy)
        .read("client", client.tail())
        .read("server", server.tail())
}

fn unanswered(ended: &Ended, tool: &str, verdict: Verdict) -> Finding {
    let (why, remedy) = meaning(&ended.text, tool);
    let finding = Finding::fail(why, remedy).read(tool, ended.tail());
    Finding { verdict, ..finding }
}

fn meaning(text: &str, tool: &str) -> (String, &'static str) {
    match causes::of(text) {
        Some(cause) => (cause.why.to_owned(), cause.remedy),
        None => (
            format!("{tool} failed"),
            "see its last lines; run it by hand at both ends",
        ),
    }
}
