// The address says what is looked at: #/namespace/name?x=step&m=loss. It can be kept, and opened again.

/** What the address names: the parts of its path, and the settings behind it. */
export function route() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  let parts = ["", ""]; // of an address that nobody has made here: there is no such job
  try {
    parts = path.split("/").slice(1).map(decodeURIComponent).filter(Boolean);
  } catch {
    // it stays so
  }
  return { parts, settings: new URLSearchParams(query) };
}

/** Note settings in the address, without a step in the browser's history; null or "" takes one out. */
export function remember(changes) {
  const { settings } = route();
  for (const [name, value] of Object.entries(changes)) {
    settings.delete(name);
    for (const item of [value].flat()) if (item !== null && item !== "") settings.append(name, item);
  }
  const path = location.hash.split("?")[0] || "#/";
  const query = String(settings);
  const wanted = query ? `${path}?${query}` : path;
  if (wanted !== (location.hash || "#/")) history.replaceState(null, "", wanted);
}
