// Adapters and their versions, as several pages need them.

import { get } from "./api.js";

const MOST = 30; // adapters of which every version is listed unasked: each costs a request

export const pathOf = (name) => `/v1/adapters/${encodeURIComponent(name)}`;
export const listAdapters = () => get("/v1/adapters");

/** Versions of an adapter, oldest first. */
export const versionsOf = async (name) => (await get(`${pathOf(name)}/versions`, {}, { quiet: true })).data;

/** Versions of all adapters of a list. */
export const allVersions = async (adapters) => (await Promise.all(adapters.map((one) => versionsOf(one.name)))).flat();

/** Ids of versions to choose from, each adapter's newest first; of many adapters the current versions only. A drafter
 * answers nothing, so there is none among them. */
export async function choices() {
  const data = (await listAdapters()).data.filter((one) => one.kind !== "drafter");
  if (data.length > MOST) return data.map((one) => one.version).filter(Boolean);
  const versions = await Promise.all(data.map((one) => versionsOf(one.name)));
  return versions.flatMap((found) => found.map((one) => one.id).reverse());
}
