// The dashboard's frame: asks for a key if there are keys, shows what the key may see, and leads to the pages.

import { html, render, useCallback, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get, hasKey, on, setKey, startAnew } from "./core/api.js";
import { Session, clearTabState, link, useRoute } from "./core/hooks.js";
import { Failure, Page } from "./parts/basics.js";
import { Dialogs } from "./parts/dialogs.js";
import { Check, TextField } from "./parts/form.js";

// Scopes of which a caller needs one; none: every key will do.
const PAGES = [
  { id: "overview", name: "Overview", load: () => import("./pages/overview.js"), scopes: [] },
  { id: "chat", name: "Chat", load: () => import("./pages/chat.js"), scopes: ["inference"] },
  { id: "jobs", name: "Jobs", load: () => import("./pages/jobs.js"), scopes: ["train", "admin"] },
  { id: "adapters", name: "Adapters", load: () => import("./pages/adapters.js"), scopes: [] },
  { id: "evaluations", name: "Evaluations", load: () => import("./pages/evaluations.js"), scopes: ["train", "admin"] },
  { id: "learning", name: "Learning", load: () => import("./pages/learning.js"), scopes: ["train", "admin"] },
  { id: "batches", name: "Batches", load: () => import("./pages/batches.js"), scopes: ["inference"] },
  { id: "sessions", name: "Sessions", load: () => import("./pages/sessions.js"), scopes: ["inference"] },
  { id: "keys", name: "Keys and limits", load: () => import("./pages/keys.js"), scopes: [] },
  { id: "events", name: "Events and logs", load: () => import("./pages/events.js"), scopes: [] },
];
const THEMES = ["system", "light", "dark"];
const THEME = "temper.theme";

function applyTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("temper-theme"));
}

function ThemeButton() {
  const [theme, setTheme] = useState(() => localStorage.getItem(THEME) ?? "system");
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const change = () => {
    localStorage.setItem(THEME, next);
    setTheme(next);
    applyTheme(next);
  };
  return html`<button class="quiet" onClick=${change} aria-label=${`Colours: ${theme}. Change to ${next}`}>Colours: ${theme}</button>`;
}

/** Loads the module of a page once it is visited. */
function PageOf({ page, route }) {
  const [found, setFound] = useState({ id: null, component: null, error: null });
  useEffect(() => {
    let gone = false;
    page
      .load()
      .then((module) => !gone && setFound({ id: page.id, component: module.default, error: null }))
      .catch((error) => !gone && setFound({ id: page.id, component: null, error }));
    return () => {
      gone = true;
    };
  }, [page.id]);
  if (found.id !== page.id) return html`<p class="muted loading" role="status">Loading …</p>`;
  if (found.error) {
    const error = { message: "A newer release has replaced this page. Load the dashboard again." };
    return html`<${Failure} error=${error} retry=${() => location.reload()} />`;
  }
  return html`<${found.component} parts=${route.parts.slice(1)} query=${route.query} />`;
}

/** The form that asks for a key; `over` a page that was open, in a dialog, for that page may have one of its own. */
function SignIn({ error, signedIn, over }) {
  const [value, setValue] = useState("");
  const [keep, setKeep] = useState(false);
  const dialog = useRef(null);
  const show = () => dialog.current && !dialog.current.open && dialog.current.showModal();
  useEffect(show, []);
  const submit = (event) => {
    event.preventDefault();
    setKey(value, { keep });
    signedIn();
  };
  const form = html`
    <form class="card" onSubmit=${submit}>
      <h1>Temper</h1>
      <p>${over ? "The key is no longer good. What is open waits for a key of the same name; any other begins anew." : "This gateway has API keys. Yours decides what you see and may do here."}</p>
      ${error && html`<p class="failure" role="alert">${error.message}</p>`}
      <${TextField} label="API key" type="password" value=${value} change=${setValue} autocomplete="off" spellcheck="false" placeholder="tp-…" required autofocus hint="Made with temper keys create. It is kept in this page's memory only." />
      <${Check} label="Keep it until this tab is closed" checked=${keep} change=${setKeep} />
      <button class="primary" type="submit">Open the dashboard</button>
    </form>
  `;
  if (!over) return html`<main class="sign-in" id="main">${form}</main>`;
  return html`<dialog class="sign-in-again" ref=${dialog} aria-label="Sign in" onCancel=${(event) => event.preventDefault()} onClose=${show}>${form}</dialog>`;
}

function Navigation({ pages, chosen, open, toggle }) {
  return html`
    <header class="top">
      <a class="brand" href=${link("overview")}>Temper</a>
      <button class="quiet menu" aria-expanded=${open} aria-controls="pages" onClick=${toggle}>Menu</button>
      <nav id="pages" class=${open ? "open" : ""} aria-label="Pages">
        ${pages.map((page) => html`<a key=${page.id} href=${link(page.id)} aria-current=${page.id === chosen ? "page" : undefined}>${page.name}</a>`)}
      </nav>
    </header>
  `;
}

function Frame({ session, signOut }) {
  const route = useRoute();
  const [open, setOpen] = useState(false);
  const pages = PAGES.filter((page) => !page.scopes.length || page.scopes.some((scope) => session.scopes.includes(scope)));
  const page = pages.find((one) => one.id === (route.parts[0] ?? "overview"));
  useEffect(() => {
    setOpen(false);
    document.title = `${page?.name ?? "Not found"} · Temper`;
  }, [page?.id]);
  const skip = (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    <${Navigation} pages=${pages} chosen=${page?.id} open=${open} toggle=${() => setOpen(!open)} />
    <main id="main" tabindex="-1">
      ${page
        ? html`<${PageOf} page=${page} route=${route} />`
        : html`<${Page} title="Not found"><${Failure} error=${{ message: "There is no such page, or your key may not see it." }} /><//>`}
    </main>
    <footer class="bottom">
      <span class="muted">${session.model}</span>
      ${session.caller && html`<span class="muted">key <code>${session.caller}</code></span>`}
      <span class="row"><${ThemeButton} />${hasKey() && html`<button class="quiet" onClick=${signOut}>Forget the key</button>`}</span>
    </footer>
  `;
}

function App() {
  const [session, setSession] = useState(null);
  const [asks, setAsks] = useState(false);
  const [error, setError] = useState(null);
  const caller = useRef(); // the name of the key, which its successor has too
  const begin = useCallback(async () => {
    const sent = hasKey(); // a refused key is forgotten before its error arrives here
    try {
      const [keys, models] = await Promise.all([get("/v1/keys"), get("/v1/models")]);
      const known = keys.data.find((one) => one.id === keys.caller)?.name || keys.caller;
      if (caller.current !== undefined && caller.current !== known) {
        clearTabState(); // somebody else's key: nothing stays of what the one before has shown
        startAnew();
        return;
      }
      caller.current = known;
      setSession({ ...keys, model: models.data[0].id });
      setAsks(false);
      setError(null);
    } catch (failure) {
      if (failure.status === 401) setAsks(true);
      setError(failure.status === 401 && !sent ? null : failure);
    }
  }, []);
  useEffect(() => {
    begin();
    return on("unauthorized", (refusal) => {
      if (hasKey()) setError(refusal); // a key that was good until now: why another is asked for
      setKey("");
      setAsks(true);
    });
  }, []);
  // With the key goes all that it has shown: what the tab keeps, and what the modules hold.
  const signOut = () => {
    setKey("");
    clearTabState();
    location.reload();
  };
  if (session === null) {
    if (asks) return html`<${SignIn} error=${error} signedIn=${begin} />`;
    return error ? html`<main id="main"><${Failure} error=${error} retry=${begin} /></main>` : html`<p class="boot">Temper</p>`;
  }
  // A key can expire in the middle of a chat: what is open stays, out of sight, until a key of the same name is given.
  return html`
    <${Session.Provider} value=${session}>
      <div key="frame" hidden=${asks}><${Frame} session=${session} signOut=${signOut} /><${Dialogs} /></div>
    <//>
    ${asks && html`<${SignIn} key="again" error=${error} signedIn=${begin} over />`}
  `;
}

applyTheme(localStorage.getItem(THEME) ?? "system");
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
