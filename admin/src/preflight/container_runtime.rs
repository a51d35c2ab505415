//! Whether the container runtime reads CDI files, from its configuration.
//!
//! containerd: on by default since 2.0, and `enable_cdi` of its CRI plugin decides; 1.7 has it off by
//! default (`docs/cri/config.md`). Only 2.0 and newer read a configuration of `version = 3` or higher
//! (`docs/containerd-2.0.md`). 1.6 knows neither CDI nor `enable_cdi`, and passes over both in
//! silence. CRI-O has had it on since 1.23.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rdma_device_plugin::files;

/// Where containerd's configuration is by default.
const CONTAINERD_CONFIG: &str = "/etc/containerd/config.toml";
/// The first version of containerd's configuration that only containerd 2.0 and newer read.
const CONTAINERD_2_CONFIG_VERSION: u32 = 3;
/// Where CRI-O's configuration is.
const CRIO_CONFIG: [&str; 2] = ["/etc/crio/crio.conf", "/etc/crio/crio.conf.d"];

/// What is known of a runtime's use of CDI.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Cdi {
    /// No runtime runs here, or none is configured.
    #[default]
    NoRuntime,
    /// containerd reads CDI files, by this configuration.
    On(String),
    /// It does not, by this configuration.
    Off(String),
    /// This configuration says nothing: newer versions do, older do not.
    Silent(String),
    /// The configuration of the running containerd cannot be read.
    OutOfSight(String),
    /// CRI-O, whose configuration does not state its version.
    CriO,
}

/// Of the runtime whose process is seen below `proc`; files are below `root`.
pub(super) fn of_running_runtime(root: &Path, proc: &Path) -> Cdi {
    let mut processes = files::processes(proc);
    processes.retain(|process| is_of_host(&proc.join(process.pid.to_string())));
    let containerds = processes
        .iter()
        .filter(|process| process.name == "containerd")
        .map(|process| proc.join(process.pid.to_string()));
    let configs: BTreeSet<PathBuf> = containerds
        .map(|process| config_argument(&files::text(&process.join("cmdline")).unwrap_or_default()))
        .collect();
    let mut list = configs.iter();
    match (list.next(), list.next()) {
        (None, _) if processes.iter().any(|process| process.name == "crio") => Cdi::CriO,
        (None, _) => Cdi::NoRuntime,
        (Some(config), None) => of_containerd(root, config),
        (Some(_), Some(_)) => {
            let list: Vec<String> = configs
                .iter()
                .map(|config| config.display().to_string())
                .collect();
            Cdi::OutOfSight(format!("(there are several: {})", list.join(", ")))
        }
    }
}

/// Whether a process is in the PID namespace that `/proc` shows. Any pod can have a process with the
/// name of the runtime: it must not decide what the node offers. `NSpid` has a number for each
/// namespace from that one on (proc(5)); it is readable without rights over the process.
fn is_of_host(process: &Path) -> bool {
    let status = files::text(&process.join("status")).unwrap_or_default();
    let mut lines = status.lines();
    let numbers = lines.find_map(|line| line.strip_prefix("NSpid:"));
    numbers.is_none_or(|numbers| numbers.split_whitespace().count() == 1)
}

/// Of the runtime that has a configuration in the usual place.
pub(super) fn of_configured_runtime(root: &Path) -> Cdi {
    if below(root, Path::new(CONTAINERD_CONFIG)).is_file() {
        of_containerd(root, Path::new(CONTAINERD_CONFIG))
    } else if CRIO_CONFIG
        .iter()
        .any(|path| below(root, Path::new(path)).exists())
    {
        Cdi::CriO
    } else {
        Cdi::NoRuntime
    }
}

/// The configuration that containerd was started with (`-c`, `--config`).
fn config_argument(command: &str) -> PathBuf {
    let mut words = command.split('\0').skip(1);
    while let Some(word) = words.next() {
        let named = match word.split_once('=') {
            Some(("-c" | "--config" | "-config", path)) => Some(path),
            None if matches!(word, "-c" | "--config" | "-config") => words.next(),
            _ => None,
        };
        if let Some(path) = named {
            return path.into();
        }
    }
    CONTAINERD_CONFIG.into()
}

fn of_containerd(root: &Path, config: &Path) -> Cdi {
    let place = config.display().to_string();
    let Some(text) = files::text(&below(root, config)) else {
        return Cdi::OutOfSight(place);
    };
    let imported = imports(&text);
    let texts = imported.iter().flat_map(|path| imported_texts(root, path));
    let words: Vec<bool> = std::iter::once(text.clone())
        .chain(texts)
        .filter_map(|text| enable_cdi(&text))
        .collect();
    // Which of two words counts depends on the order of files and on the version.
    if words.contains(&false) {
        Cdi::Off(place)
    } else if !words.is_empty() {
        Cdi::On(place)
    } else if version(&text).is_some_and(|version| version >= CONTAINERD_2_CONFIG_VERSION) {
        Cdi::On(format!("{place} (of containerd 2.0 or newer)"))
    } else {
        Cdi::Silent(place)
    }
}

/// A path of the host below the host's root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Lines without comments.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
}

/// The value of `enable_cdi`, in whichever table.
fn enable_cdi(text: &str) -> Option<bool> {
    lines(text).find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "enable_cdi").then(|| value.trim() == "true")
    })
}

/// `version` at the top level.
fn version(text: &str) -> Option<u32> {
    let mut top = lines(text).take_while(|line| !line.starts_with('['));
    top.find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "version").then(|| value.trim().parse().ok())?
    })
}

/// Paths and patterns in `imports`.
fn imports(text: &str) -> Vec<String> {
    let top: Vec<&str> = lines(text).collect();
    let top = top.join(" ");
    let Some((_, list)) = top.split_once("imports") else {
        return Vec::new();
    };
    let list = list.trim_start().strip_prefix('=').unwrap_or_default();
    let list = list.split(']').next().unwrap_or_default();
    let quoted = list.split(['"', '\'']).skip(1).step_by(2);
    quoted.map(str::to_owned).collect()
}

/// Texts of the files that an import names: one file, or `DIRECTORY/*.toml`.
fn imported_texts(root: &Path, import: &str) -> Vec<String> {
    let path = below(root, Path::new(import));
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Vec::new();
    };
    let name = name.to_string_lossy();
    let names = match name.split_once('*') {
        None => vec![name.to_string()],
        Some((start, end)) => {
            let mut names = files::names(directory);
            names.retain(|name| name.starts_with(start) && name.ends_with(end));
            names
        }
    };
    let texts = names
        .iter()
        .filter_map(|name| files::text(&directory.join(name)));
    texts.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What is known where containerd runs with these arguments and files.
    fn of(arguments: &str, paths: &[(&str, &str)]) -> Cdi {
        let root = tempfile::tempdir().unwrap();
        let process = root.path().join("proc/7");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), "containerd\n").unwrap();
        fs::write(process.join("cmdline"), arguments.replace(' ', "\0")).unwrap();
        for (path, text) in paths {
            let path = below(root.path(), Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        of_running_runtime(root.path(), &root.path().join("proc"))
    }

    #[test]
    fn containerd_reads_cdi_files_by_its_configurations_version_or_word() {
        let place = || CONTAINERD_CONFIG.to_owned();
        for (text, expected) in [
            (
                "version = 3\n",
                Cdi::On(format!("{} (of containerd 2.0 or newer)", place())),
            ),
            ("version = 2\n", Cdi::Silent(place())),
            ("[x]\nversion = 3\n", Cdi::Silent(place())),
            ("# version = 3\n", Cdi::Silent(place())),
            (
                "version = 2\n[plugins.x]\n  enable_cdi = true # yes\n",
                Cdi::On(place()),
            ),
            (
                "version = 3\n[plugins.x]\n  enable_cdi=false\n",
                Cdi::Off(place()),
            ),
            ("# enable_cdi = true\n", Cdi::Silent(place())),
        ] {
            assert_eq!(
                of("containerd", &[(CONTAINERD_CONFIG, text)]),
                expected,
                "{text}"
            );
        }
    }

    #[test]
    fn imported_files_have_a_say() {
        let main = "version = 3\nimports = [\n  \"/etc/containerd/conf.d/*.toml\",\n  '/opt/more.toml'\n]\n";
        let off = (
            "/etc/containerd/conf.d/9.toml",
            "[plugins.x]\nenable_cdi = false\n",
        );
        let other = ("/etc/containerd/conf.d/9.txt", "enable_cdi = false\n");
        let more = ("/opt/more.toml", "enable_cdi = false\n");
        let main = (CONTAINERD_CONFIG, main);
        assert!(matches!(of("containerd", &[main, off]), Cdi::Off(_)));
        assert!(matches!(of("containerd", &[main, more]), Cdi::Off(_)));
        assert!(matches!(of("containerd", &[main, other]), Cdi::On(_)));
    }

    #[test]
    fn configuration_is_that_of_the_running_process() {
        let files = [
            (CONTAINERD_CONFIG, "version = 3\n"),
            ("/k3s/c.toml", "version = 2\n"),
        ];
        for arguments in [
            "containerd -c /k3s/c.toml -a /run/x",
            "containerd --config=/k3s/c.toml",
        ] {
            assert_eq!(
                of(arguments, &files),
                Cdi::Silent("/k3s/c.toml".into()),
                "{arguments}"
            );
        }
        assert_eq!(
            of("containerd -c /else.toml", &files),
            Cdi::OutOfSight("/else.toml".into())
        );
        assert!(matches!(
            of("containerd --log-level warn", &files),
            Cdi::On(_)
        ));
    }

    #[test]
    fn a_file_without_a_process_is_of_no_running_runtime() {
        let root = tempfile::tempdir().unwrap();
        let file = below(root.path(), Path::new(CONTAINERD_CONFIG));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "version = 3\n").unwrap();
        let proc = root.path().join("proc");
        assert_eq!(of_running_runtime(root.path(), &proc), Cdi::NoRuntime);
        assert!(matches!(of_configured_runtime(root.path()), Cdi::On(_)));
        fs::create_dir_all(proc.join("9")).unwrap();
        fs::write(proc.join("9/comm"), "crio\n").unwrap();
        assert_eq!(of_running_runtime(root.path(), &proc), Cdi::CriO);
    }

    #[test]
    fn a_process_of_a_pod_with_the_runtimes_name_is_not_the_runtime() {
        let root = tempfile::tempdir().unwrap();
        let process = root.path().join("proc/77");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), "crio\n").unwrap();
        let proc = root.path().join("proc");
        let seen = || of_running_runtime(root.path(), &proc);
        fs::write(process.join("status"), "Name:\tcrio\nNSpid:\t77\t1\n").unwrap();
        assert_eq!(seen(), Cdi::NoRuntime);
        fs::write(process.join("status"), "Name:\tcrio\nNSpid:\t77\n").unwrap();
        assert_eq!(seen(), Cdi::CriO);
    }
}
