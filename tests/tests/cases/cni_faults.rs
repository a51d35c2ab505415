//! `rdma-netdev` killed, or refused by the kernel, at system calls all through ADD and DEL.
//!
//! A call is traced once to know its system calls. Then it is made again and again, each time
//! with a kill or an error at another one of them. Afterwards one DEL must leave the host as
//! before; after an error, which the plugin lives to see, not even that is needed.
//!
//! Where nothing was changed since the last kill, another shows nothing new: points are the
//! system calls that change something and those right after. Some of them, evenly spread, are
//! tried by default; `RDMA_E2E_FAULTS=all` tries every one.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use e2e::case;
use e2e::cni::{Answer, Call, answer};
use e2e::cni_host::{CniHost, same};
use e2e::harness::Case;
use e2e::netns::Netns;
use e2e::node_socket::{NodeSocket, allocation_of_hcas};
use e2e::scene::{Scene, pci_of};
use node_wire::Pod;
use serde_json::{Value, json};

pub(crate) const CASES: &[Case] = &[
    case!(
        a_killed_add_of_a_macvlan_leaves_nothing,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(a_killed_add_of_a_move_leaves_nothing, Root, Netns, Strace),
    case!(
        a_killed_del_of_a_macvlan_is_finished_by_the_next,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(
        a_killed_del_of_a_move_is_finished_by_the_next,
        Root,
        Netns,
        Strace
    ),
    case!(
        a_refused_add_of_a_macvlan_undoes_itself,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(a_refused_add_of_a_move_undoes_itself, Root, Netns, Strace),
    case!(
        a_passing_want_of_memory_costs_a_move_nothing,
        Root,
        Netns,
        Strace
    ),
    case!(
        an_add_after_a_killed_one_succeeds,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(
        a_veth_is_found_when_del_was_killed_after_its_move,
        Root,
        Netns,
        Strace
    ),
    case!(
        a_killed_add_of_all_nics_leaves_nothing,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(
        a_killed_del_of_all_nics_is_finished_by_the_next,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(
        a_refused_add_of_all_nics_undoes_itself,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(
        a_lock_file_that_cannot_be_read_fails_at_once,
        Root,
        Netns,
        Macvlan,
        Strace
    ),
    case!(a_refused_move_to_the_host_fails_del, Root, Netns, Strace),
    case!(a_refused_name_is_a_warning, Root, Netns, Strace),
    case!(
        a_refused_request_of_a_restoration_costs_its_row_alone,
        Root,
        Netns,
        Strace
    ),
    case!(
        a_name_taken_while_del_moves_is_for_later,
        Root,
        Netns,
        Strace
    ),
    case!(
        a_name_taken_while_del_renames_is_for_later,
        Root,
        Netns,
        Strace
    ),
];

/// The n-th call of one system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) syscall: String,
    pub(crate) number: usize,
}

/// The command of `call` under strace, which writes to nowhere and injects as `options` say.
pub(crate) fn traced(call: &Call, command: &str, options: &[&str]) -> std::process::Command {
    let mut strace = Call {
        plugin: "strace".into(),
        ..call.clone()
    }
    .command(command);
    strace.args(options).arg("--").arg(&call.plugin);
    strace
}

/// Whether a system call changes anything outside the process.
fn changes(name: &str, line: &str) -> bool {
    const CHANGING: [&str; 8] = [
        "sendto", "write", "setns", "flock", "unlink", "rename", "link", "mkdir",
    ];
    CHANGING.iter().any(|changing| name.starts_with(changing))
        || (name.starts_with("open") && line.contains("O_CREAT"))
}

/// The points of a command, in order; it is carried out.
pub(crate) fn trace(
    host: &CniHost,
    call: &Call,
    command: &str,
    config: &str,
) -> Result<Vec<Point>> {
    let file = host.directory().join("trace");
    let path = file.to_string_lossy().into_owned();
    answer(
        &mut traced(call, command, &["-qq", "-o", &path]),
        config.as_bytes(),
    )?
    .success()?;
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut points = Vec::new();
    let mut after = false;
    for line in std::fs::read_to_string(&file)?.lines() {
        let Some((name, _)) = line.split_once('(') else {
            continue;
        };
        if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            continue;
        }
        // The first is strace's own doing; a process that is leaving has done its work.
        if matches!(name, "execve" | "exit_group") {
            continue;
        }
        let number = counts.entry(name.to_owned()).or_default();
        *number += 1;
        let changing = changes(name, line);
        if !std::mem::replace(&mut after, changing) && !changing {
            continue;
        }
        points.push(Point {
            syscall: name.to_owned(),
            number: *number,
        });
    }
    ensure!(
        points.len() > 10,
        "only {} system calls in {path}",
        points.len()
    );
    Ok(points)
}

/// All points, or about so many, spread evenly and the last among them.
pub(crate) fn spread(points: &[Point], about: usize) -> Vec<Point> {
    if std::env::var("RDMA_E2E_FAULTS").is_ok_and(|value| value == "all") {
        return points.to_vec();
    }
    let count = about.min(points.len());
    (1..=count)
        .filter_map(|n| points.get(n * points.len() / count - 1))
        .cloned()
        .collect()
}

pub(crate) fn inject(
    call: &Call,
    command: &str,
    config: &str,
    point: &Point,
    what: &str,
) -> Result<Answer> {
    let rule = format!("inject={}:{what}:when={}", point.syscall, point.number);
    answer(
        &mut traced(call, command, &["-qq", "-o", "/dev/null", "-e", &rule]),
        config.as_bytes(),
    )
}

pub(crate) fn was_killed(answer: &Answer) -> bool {
    use std::os::unix::process::ExitStatusExt;
    answer.status.signal() == Some(9) || answer.status.code() == Some(137)
}

/// Rounds of kills until ten of one took effect: on a busy machine the traced call may have waited
/// for the kernel in more system calls than those after it have.
pub(crate) fn at_least_ten_killed(mut round: impl FnMut() -> Result<usize>) -> Result<()> {
    let mut killed = 0;
    for _ in 0..5 {
        killed = round()?;
        if killed >= 10 {
            return Ok(());
        }
    }
    bail!("only {killed} kills took effect")
}

/// The host of a fixture.
enum Place {
    /// One NIC.
    Nic(CniHost),
    /// Several NICs with RDMA devices, all of which the daemon says the pod has.
    Nics {
        scene: Box<Scene>,
        _daemon: NodeSocket,
    },
}

impl Place {
    fn host(&self) -> &CniHost {
        match self {
            Place::Nic(host) => host,
            Place::Nics { scene, .. } => &scene.host,
        }
    }
}

struct Fixture {
    place: Place,
    pod: Netns,
    config: String,
    before: BTreeMap<String, String>,
}

impl Fixture {
    fn new(keys: impl Fn(&CniHost) -> Value) -> Result<Self> {
        let host = CniHost::new()?;
        for command in [
            "link set nic0 mtu 1450",
            "route add 10.77.0.0/16 via 10.9.0.254 metric 50",
            "route add default via 10.9.0.254 table 101",
            "rule add from 10.9.0.1 lookup 101 pref 1000",
            "neigh add 10.9.0.254 lladdr 02:00:00:00:00:fe dev nic0 nud permanent",
        ] {
            host.netns.ip(command)?;
        }
        Self::at(Place::Nic(host), keys)
    }

    /// All of three NICs, by macvlans with leased addresses or by moving them.
    fn all_nics(attach: &str) -> Result<Self> {
        const NICS: u8 = 3;
        let scene = Scene::with_nics(NICS)?;
        let socket = NodeSocket::start(&scene.host_root().join("run/rdma-netdev/node.sock"))?;
        let units: Vec<String> = (0..NICS).map(pci_of).collect();
        let units: Vec<&str> = units.iter().map(String::as_str).collect();
        let pod = Pod {
            namespace: "ml".into(),
            name: "a".into(),
            uid: None,
        };
        let mut held = allocation_of_hcas("main", "rdma/nic", &units, &units);
        held.pool.clone_from(&held.hcas);
        socket.hold(&pod, vec![held]);
        let place = Place::Nics {
            scene: Box::new(scene),
            _daemon: socket,
        };
        Self::at(place, |host| {
            let mut config = json!({"attach": attach, "devices": "all", "deviceID": pci_of(0)});
            if attach != "move" {
                config["ipam"] = host.own_ipam("10.64.0.0/24", "10.64.0.10", &json!({}));
            }
            config
        })
    }

    fn at(place: Place, keys: impl Fn(&CniHost) -> Value) -> Result<Self> {
        let host = place.host();
        let config = host.config(&keys(host)).to_string();
        let fixture = Fixture {
            pod: host.pod()?,
            before: host.picture()?,
            config,
            place,
        };
        // The first ADD on a node sets up directories and tries the store; later ones, which
        // are disturbed here, have fewer system calls.
        fixture
            .call()
            .run("ADD", fixture.config.as_bytes())?
            .success()?;
        fixture.del()?;
        fixture.clean("after the first round")?;
        Ok(fixture)
    }

    fn macvlan() -> Result<Self> {
        Fixture::new(|host| {
            let ipam = host.own_ipam("10.9.0.0/24", "10.9.0.100", &json!({}));
            json!({"attach": "macvlan", "master": "nic0", "ipam": ipam})
        })
    }

    fn moving() -> Result<Self> {
        Fixture::new(|_| json!({"attach": "move", "device": "nic0"}))
    }

    fn host(&self) -> &CniHost {
        self.place.host()
    }

    fn call(&self) -> Call {
        match &self.place {
            Place::Nic(host) => host.call(&self.pod, "c1", "net1"),
            Place::Nics { scene, .. } => {
                let mut call = scene.call_of(&self.pod, "c1", "net1");
                call.args = "K8S_POD_NAMESPACE=ml;K8S_POD_NAME=a".to_owned();
                call
            }
        }
    }

    fn del(&self) -> Result<()> {
        self.call().run("DEL", self.config.as_bytes())?.success()?;
        Ok(())
    }

    fn clean(&self, when: &str) -> Result<()> {
        // The kernel reports the carrier to the far end of a link a little later.
        let started = Instant::now();
        while let Err(differs) = same(&self.before, &self.host().picture()?, when) {
            if started.elapsed() > Duration::from_secs(3) {
                return Err(differs);
            }
        }
        let links = self.pod.ip("-br link show")?;
        ensure!(
            links.lines().all(|link| link.starts_with("lo ")),
            "{when}, interfaces are left in the pod:\n{links}"
        );
        let rules = self.pod.ip("rule")?;
        ensure!(
            !rules.contains("101"),
            "{when}, rules are left in the pod:\n{rules}"
        );
        Ok(())
    }

    /// Kills ADD at points spread over it; DEL cleans up.
    fn killed_adds(&self) -> Result<()> {
        at_least_ten_killed(|| {
            let points = trace(self.host(), &self.call(), "ADD", &self.config)?;
            self.del()?;
            self.clean("after an undisturbed round")?;
            let mut killed = 0;
            for point in spread(&points, 16) {
                let answer = inject(&self.call(), "ADD", &self.config, &point, "signal=KILL")?;
                killed += usize::from(was_killed(&answer));
                self.del()
                    .with_context(|| format!("DEL after a kill at {point:?}"))?;
                self.clean(&format!("after a kill at {point:?} and DEL"))?;
            }
            Ok(killed)
        })
    }

    /// Kills DEL at points spread over it; another DEL finishes it.
    fn killed_dels(&self) -> Result<()> {
        let add = || self.call().run("ADD", self.config.as_bytes())?.success();
        at_least_ten_killed(|| {
            add()?;
            let points = trace(self.host(), &self.call(), "DEL", &self.config)?;
            self.clean("after an undisturbed round")?;
            let mut killed = 0;
            for point in spread(&points, 12) {
                add()?;
                let answer = inject(&self.call(), "DEL", &self.config, &point, "signal=KILL")?;
                killed += usize::from(was_killed(&answer));
                self.del()
                    .with_context(|| format!("DEL after a kill at {point:?}"))?;
                self.clean(&format!("after a DEL killed at {point:?} and another"))?;
            }
            Ok(killed)
        })
    }

    /// Lets each netlink request of ADD fail, of several NICs' about sixty; it must undo what it did by
    /// itself.
    fn refused_adds(&self) -> Result<()> {
        let points = trace(self.host(), &self.call(), "ADD", &self.config)?;
        self.del()?;
        let requests: Vec<Point> = points
            .into_iter()
            .filter(|p| matches!(p.syscall.as_str(), "sendto" | "setns"))
            .collect();
        ensure!(requests.len() > 10, "{requests:?}");
        let mut failed = 0;
        let tried = match self.place {
            Place::Nic(_) => requests,
            Place::Nics { .. } => spread(&requests, 60),
        };
        for point in tried {
            let answer = inject(&self.call(), "ADD", &self.config, &point, "error=EPERM")?;
            if answer.status.success() {
                // The read of the IPv6 default route may fail, for instance.
                self.del()?;
            } else {
                failed += 1;
                answer
                    .refusal()
                    .with_context(|| format!("refused at {point:?}"))?;
            }
            self.clean(&format!("after an error at {point:?}"))?;
        }
        ensure!(failed > 10, "only {failed} errors took effect");
        Ok(())
    }
}

/// Each netlink request of DEL is refused once for want of memory: nothing is lost.
fn a_passing_want_of_memory_costs_a_move_nothing() -> Result<()> {
    let fixture = Fixture::moving()?;
    answer_of_add(&fixture)?;
    let points = trace(fixture.host(), &fixture.call(), "DEL", &fixture.config)?;
    fixture.clean("after a DEL that was watched")?;
    let sent: Vec<Point> = points
        .into_iter()
        .filter(|point| point.syscall == "sendto")
        .collect();
    ensure!(sent.len() > 10, "{sent:?}");
    for point in sent {
        answer_of_add(&fixture)?;
        inject(
            &fixture.call(),
            "DEL",
            &fixture.config,
            &point,
            "error=ENOBUFS",
        )?
        .success()
        .with_context(|| format!("DEL with an error at {point:?}"))?;
        fixture.clean(&format!("after an error at {point:?}"))?;
    }
    Ok(())
}

fn answer_of_add(fixture: &Fixture) -> Result<()> {
    let answer = fixture.call().run("ADD", fixture.config.as_bytes())?;
    answer.success().map(drop).context("ADD")
}

fn a_killed_add_of_a_macvlan_leaves_nothing() -> Result<()> {
    Fixture::macvlan()?.killed_adds()
}

fn a_killed_add_of_all_nics_leaves_nothing() -> Result<()> {
    Fixture::all_nics("macvlan")?.killed_adds()?;
    Fixture::all_nics("move")?.killed_adds()
}

fn a_killed_del_of_all_nics_is_finished_by_the_next() -> Result<()> {
    Fixture::all_nics("macvlan")?.killed_dels()?;
    Fixture::all_nics("move")?.killed_dels()
}

fn a_refused_add_of_all_nics_undoes_itself() -> Result<()> {
    Fixture::all_nics("macvlan")?.refused_adds()?;
    Fixture::all_nics("move")?.refused_adds()
}

fn a_killed_add_of_a_move_leaves_nothing() -> Result<()> {
    Fixture::moving()?.killed_adds()
}

fn a_killed_del_of_a_macvlan_is_finished_by_the_next() -> Result<()> {
    Fixture::macvlan()?.killed_dels()
}

fn a_killed_del_of_a_move_is_finished_by_the_next() -> Result<()> {
    Fixture::moving()?.killed_dels()
}

fn a_refused_add_of_a_macvlan_undoes_itself() -> Result<()> {
    Fixture::macvlan()?.refused_adds()
}

fn a_refused_add_of_a_move_undoes_itself() -> Result<()> {
    Fixture::moving()?.refused_adds()
}

/// A runtime that tries again without a DEL in between.
fn an_add_after_a_killed_one_succeeds() -> Result<()> {
    for fixture in [
        Fixture::new(|_| json!({"attach": "macvlan", "master": "nic0"}))?,
        Fixture::moving()?,
        Fixture::all_nics("macvlan")?,
        Fixture::all_nics("move")?,
    ] {
        let points = trace(fixture.host(), &fixture.call(), "ADD", &fixture.config)?;
        fixture.del()?;
        for point in spread(&points, 12) {
            inject(
                &fixture.call(),
                "ADD",
                &fixture.config,
                &point,
                "signal=KILL",
            )?;
            let again = fixture.call().run("ADD", fixture.config.as_bytes())?;
            if !again.status.success() {
                // Refused only because the interface is there: the runtime's DEL is due first.
                let (code, message) = again.refusal()?;
                ensure!(code == 103, "after a kill at {point:?}: {message}");
            }
            fixture.del()?;
            fixture.clean(&format!("after a kill at {point:?}, ADD and DEL"))?;
        }
    }
    Ok(())
}

/// A call that took a lock does not wait for itself.
fn a_lock_file_that_cannot_be_read_fails_at_once() -> Result<()> {
    let fixture = Fixture::macvlan()?;
    let file = fixture.host().directory().join("trace");
    let options = ["-qq", "-y", "-o", &file.to_string_lossy()];
    let config = fixture.config.as_bytes();
    answer(&mut traced(&fixture.call(), "ADD", &options), config)?.success()?;
    fixture.del()?;
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let mut points = Vec::new();
    let trace = std::fs::read_to_string(&file)?;
    for (name, rest) in trace.lines().filter_map(|line| line.split_once('(')) {
        let number = counts.entry(name).or_default();
        *number += 1;
        let reads = matches!(name, "fstat" | "lstat" | "stat" | "statx" | "newfstatat");
        if reads && (rest.contains("/lock>") || rest.contains("/lock\"")) {
            points.push(Point {
                syscall: name.to_owned(),
                number: *number,
            });
        }
    }
    ensure!(points.len() >= 4, "{points:?}");
    for point in points {
        let started = Instant::now();
        let refused = inject(&fixture.call(), "ADD", &fixture.config, &point, "error=EIO")?;
        let (code, message) = refused.refusal()?;
        ensure!(
            code == 105 && message.contains("lock"),
            "{point:?}: {code} {message}"
        );
        ensure!(started.elapsed() < Duration::from_secs(8), "{point:?}");
        fixture.del()?;
        fixture.clean(&format!("after an error at {point:?}"))?;
    }
    Ok(())
}

/// Whether a request moves a link (`IFLA_NET_NS_FD`); strace shows those that are sent in a namespace
/// other than its own as bytes.
fn moves(line: &str) -> bool {
    line.contains("IFLA_NET_NS_FD") || line.contains(r"\x08\x00\x1c\x00")
}

/// Whether a request gives a link of the host a name.
fn renames(line: &str) -> bool {
    line.contains("RTM_SETLINK") && line.contains("IFLA_IFNAME")
}

/// How often a request is met by its number: a dump that is interrupted is repeated, and moves those
/// behind it on (`NLM_F_DUMP_INTR`).
const TRIES: usize = 25;

/// The last such request of a DEL, which is carried out: a move is repeated where an index is taken.
fn request(host: &CniHost, call: &Call, config: &str, wanted: fn(&str) -> bool) -> Result<Point> {
    let file = host.directory().join("trace").display().to_string();
    let options = ["-qq", "-v", "-s", "256", "-o", &file];
    answer(&mut traced(call, "DEL", &options), config.as_bytes())?.success()?;
    let trace = std::fs::read_to_string(&file)?;
    let requests = trace.lines().filter(|line| line.starts_with("sendto("));
    let requests: Vec<&str> = requests.collect();
    let earlier = requests
        .iter()
        .rposition(|line| wanted(line))
        .context("DEL sends no such request")?;
    Ok(Point {
        syscall: "sendto".to_owned(),
        number: earlier + 1,
    })
}

/// The pod changed its address, and a link of the host has its index meanwhile: its peer says which one
/// it is.
fn a_veth_is_found_when_del_was_killed_after_its_move() -> Result<()> {
    let host = CniHost::new()?;
    host.netns.ip("link add mv0 type veth peer name near")?;
    let config = host
        .config(&json!({"attach": "move", "device": "mv0"}))
        .to_string();
    let (pod, before) = (host.pod()?, host.picture()?);
    let call = host.call(&pod, "c1", "net1");
    let taken = || -> Result<()> {
        // It gets another one when it returns.
        let index = host.netns.ip_json("link show mv0")?[0]["ifindex"].clone();
        call.run("ADD", config.as_bytes())?.success()?;
        pod.ip("link set net1 down")?;
        pod.ip("link set net1 address 02:66:66:66:66:66")?;
        host.netns.ip(&format!(
            "link add other index {index} type veth peer name far"
        ))?;
        Ok(())
    };
    let returned = |when: &str| -> Result<()> {
        call.run("DEL", config.as_bytes())?
            .success()
            .context(when.to_owned())?;
        host.netns.ip("link del other")?;
        same(&before, &host.picture()?, when)
    };
    for _ in 0..TRIES {
        taken()?;
        let moved = request(&host, &call, &config, moves)?;
        returned("after a DEL that was watched")?;
        taken()?;
        let next = Point {
            number: moved.number + 1,
            ..moved
        };
        let killed = inject(&call, "DEL", &config, &next, "signal=KILL")?;
        let after_the_move = was_killed(&killed)
            && host.netns.ip("link")?.contains("rdma-dev")
            && pod.ip("link show net1").is_err();
        returned("after the next DEL")?;
        if after_the_move {
            return Ok(());
        }
    }
    bail!("it was never killed after the move")
}

fn a_name_taken_while_del_moves_is_for_later() -> Result<()> {
    name_taken(moves, |_, _| Ok(()))
}

fn a_name_taken_while_del_renames_is_for_later() -> Result<()> {
    name_taken(renames, arrives)
}

/// The NIC comes to the host as from a namespace that ended.
fn arrives(host: &CniHost, pod: &Netns) -> Result<()> {
    pod.ip(&format!("link set net1 netns {}", host.netns.name()))?;
    Ok(())
}

fn a_refused_move_to_the_host_fails_del() -> Result<()> {
    refused_once(
        moves,
        |_, _| Ok(()),
        |fixture, refused| {
            let what = "move net1 to the host as rdma-dev";
            let refused = refused.refusal();
            fixture.del()?;
            Ok(refused.is_ok_and(|(_, message)| message.contains(what)))
        },
    )
}

fn a_refused_name_is_a_warning() -> Result<()> {
    refused_once(renames, arrives, |fixture, refused| {
        let is_named = fixture.host().netns.ip("link show nic0").is_ok();
        let links = fixture.host().netns.ip("addr")?;
        fixture.del()?;
        if is_named || !refused.stderr.contains("rename net1 to nic0") {
            return Ok(false);
        }
        refused.success()?;
        ensure!(
            links.contains("10.9.0.1/24"),
            "its state did not come back:\n{links}"
        );
        Ok(true)
    })
}

/// DEL succeeds, and what is not as before is named, whichever request fails once the NIC is on the
/// host.
fn a_refused_request_of_a_restoration_costs_its_row_alone() -> Result<()> {
    const ROWS: [(&str, &str, &str); 4] = [
        ("link show", "nic0", "until it can be renamed"),
        ("link show up", "rdma-dev|nic0", "restore up"),
        ("addr", "10.9.0.1/24", "restore address 10.9.0.1/24"),
        ("route", "10.77.0.0/16", "restore route 10.77.0.0/16"),
    ];
    let mut refused = 0;
    let moved = || -> Result<Fixture> {
        let fixture = Fixture::moving()?;
        let (host, pod) = (fixture.host(), &fixture.pod);
        let added = fixture.call().run("ADD", fixture.config.as_bytes())?;
        added.success()?;
        pod.ip("link set net1 address 02:66:66:66:66:66 mtu 1400")?;
        arrives(host, pod)?;
        Ok(fixture)
    };
    let fixture = moved()?;
    let mut points = trace(fixture.host(), &fixture.call(), "DEL", &fixture.config)?;
    points.retain(|point| point.syscall == "sendto");
    for point in spread(&points, 20) {
        // Anew: what is refused is lost.
        let fixture = moved()?;
        let host = fixture.host();
        let answer = inject(&fixture.call(), "DEL", &fixture.config, &point, "error=EIO")?;
        if !answer.status.success() {
            let (_, message) = answer.refusal()?;
            let is_elsewhere = message.contains("remove rule") || message.contains("list netdevs");
            ensure!(is_elsewhere, "{point:?}: DEL fails: {message}");
            continue;
        }
        refused += usize::from(answer.stderr.contains("i/o error"));
        for (command, expected, warning) in ROWS {
            let shown = host.netns.ip(command)?;
            ensure!(
                expected.split('|').any(|name| shown.contains(name))
                    || answer.stderr.contains(warning),
                "{point:?}: {expected} is lost without a warning: {}",
                answer.stderr
            );
        }
    }
    ensure!(refused >= 5, "only {refused} requests were refused");
    Ok(())
}

impl Fixture {
    /// The host is as before the ADD, or is soon: after several changes of a carrier the kernel
    /// says once a second how it is (`linkwatch_schedule_work()`).
    fn is_as_before(&self, when: &str) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(3);
        loop {
            match same(&self.before, &self.host().picture()?, when) {
                Err(_) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                compared => return compared,
            }
        }
    }
}

/// Stops a DEL at its last such request, in whichever way `attempt` does; once more where that
/// found the request to be another one.
fn at_request(
    fixture: &Fixture,
    wanted: fn(&str) -> bool,
    prepare: impl Fn(&CniHost, &Netns) -> Result<()>,
    attempt: impl Fn(&Call, &Point) -> Result<bool>,
) -> Result<()> {
    let Fixture { pod, config, .. } = fixture;
    let host = fixture.host();
    let call = host.call(pod, "c1", "net1");
    let taken = || -> Result<()> {
        call.run("ADD", config.as_bytes())?.success()?;
        prepare(host, pod)
    };
    for _ in 0..TRIES {
        taken()?;
        let point = request(host, &call, config, wanted)?;
        taken()?;
        if attempt(&call, &point)? {
            return Ok(());
        }
    }
    bail!("DEL was never stopped at this request")
}

/// An error that says nothing of a name is no reason to try another one. `repeats` makes the next DEL;
/// false where the first was not stopped at this request.
fn refused_once(
    wanted: fn(&str) -> bool,
    prepare: impl Fn(&CniHost, &Netns) -> Result<()>,
    repeats: impl Fn(&Fixture, &Answer) -> Result<bool>,
) -> Result<()> {
    for _ in 0..TRIES {
        // Anew: where another request is refused, what it restores is lost.
        let fixture = Fixture::moving()?;
        let Fixture { pod, config, .. } = &fixture;
        let host = fixture.host();
        let call = host.call(pod, "c1", "net1");
        let taken = || -> Result<()> {
            call.run("ADD", config.as_bytes())?.success()?;
            prepare(host, pod)
        };
        taken()?;
        let point = request(host, &call, config, wanted)?;
        taken()?;
        let refused = inject(&call, "DEL", config, &point, "error=EPERM")?;
        if repeats(&fixture, &refused)? {
            return fixture.is_as_before("after the next DEL");
        }
    }
    bail!("DEL was never stopped at this request")
}

/// DEL has found the NIC's name free when another netdev takes it, before such a request.
fn name_taken(
    wanted: fn(&str) -> bool,
    prepare: impl Fn(&CniHost, &Netns) -> Result<()>,
) -> Result<()> {
    let fixture = Fixture::moving()?;
    let (host, config) = (fixture.host(), &fixture.config);
    at_request(&fixture, wanted, prepare, |call, point| {
        let (named, delayed) = std::thread::scope(|scope| {
            let del = scope.spawn(|| inject(call, "DEL", config, point, "delay_enter=3000000"));
            std::thread::sleep(Duration::from_millis(1500));
            let named = host.netns.ip("link add nic0 type veth peer name other");
            (named, del.join())
        });
        let delayed = delayed.map_err(|_| anyhow!("DEL panicked"))??;
        if named.is_err() {
            // The NIC was there already.
            delayed.success().context("DEL")?;
            fixture.is_as_before("after a DEL that was late")?;
            return Ok(false);
        }
        ensure!(
            delayed.stderr.contains("name of another netdev"),
            "{}",
            delayed.stderr
        );
        delayed.success().context("DEL")?;
        let links = host.netns.ip("addr")?;
        ensure!(
            links.contains("10.9.0.1/24") && links.contains("rdma-dev"),
            "its state did not come back:\n{links}"
        );
        host.netns.ip("link del nic0")?;
        call.run("DEL", config.as_bytes())?.success()?;
        fixture.is_as_before("after the repair")?;
        Ok(true)
    })
}
