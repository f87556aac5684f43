// The REST API to read and to try: Swagger UI over the service's own schema, with the key of this tab.

import { get, rememberKey, storedKey } from "./api.js";

const form = document.getElementById("key-form");
const problem = document.getElementById("problem");
const place = document.getElementById("reference");

function withKey(request) {
  const key = storedKey();
  if (key && !request.headers.Authorization) request.headers.Authorization = `Bearer ${key}`;
  return request;
}

function show(spec) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
  follow();
  dark.addEventListener("change", follow);
  window.SwaggerUIBundle({
    spec,
    domNode: place,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    requestInterceptor: withKey,
    supportedSubmitMethods: ["get", "post", "put", "patch", "delete", "head"],
    tryItOutEnabled: true,
    validatorUrl: null,
  });
}

async function begin() {
  try {
    show(await get("/openapi.json"));
    form.hidden = true;
  } catch (error) {
    form.hidden = error.status !== 401 && error.status !== 403;
    problem.textContent = storedKey() || form.hidden ? error.message : "";
    place.textContent = form.hidden ? error.message : "";
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  rememberKey(document.getElementById("key-input").value.trim());
  begin();
});

begin();
